/// Texts are the same on every layout, whatever they are drawn by; what goes wrong is told on every rank.

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/engine/generate.hpp"
#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {
namespace {

using namespace edge;
using Prompts = std::vector<std::vector<std::int32_t>>;

const Prompts kPrompts = {{3, 1, 4, 1, 5}, {9}, {2, 6}, {5, 3, 5, 8, 9, 7, 9, 3, 2}, {3, 8}};

void expect_same(const std::vector<Generated>& got, const std::vector<Generated>& expected,
                 const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), expected[i].size()) << what << ", prompt " << i;
    for (std::size_t j = 0; j < got[i].size(); ++j) {
      const GeneratedText &a = got[i][j], &b = expected[i][j];
      EXPECT_EQ(a.tokens, b.tokens) << what << ", prompt " << i;
      EXPECT_EQ(a.stopped, b.stopped) << what << ", prompt " << i;
      EXPECT_NEAR(a.score, b.score, 1e-4) << what;
      ASSERT_EQ(a.logprobs.size(), b.logprobs.size()) << what;
      for (std::size_t t = 0; t < a.logprobs.size(); ++t)
        EXPECT_NEAR(a.logprobs[t], b.logprobs[t], 1e-5 * std::max(1.0f, std::abs(b.logprobs[t]))) << what;
    }
  }
}

/// By name. Prompts that an encoder reads have no probabilities.
std::map<std::string, GenerationOptions> ways(const Model& model) {
  std::map<std::string, GenerationOptions> all;
  all["greedy"] = {.max_new_tokens = 6, .temperature = 0, .logprobs = true};
  if (!model.reads_encoder_tokens()) {
    all["scored"] = {
        .max_new_tokens = 3, .temperature = 0, .num_samples = 2, .logprobs = true, .prompt_logprobs = true};
    all["scored alone"] = {.max_new_tokens = 0, .logprobs = true, .prompt_logprobs = true};
  }
  all["plain"] = {.max_new_tokens = 6, .seed = 3, .num_samples = 2, .logprobs = true};
  all["top_k"] = {.max_new_tokens = 6, .temperature = 0.7, .top_k = 9, .seed = 4, .logprobs = true};
  all["top_p"] = {.max_new_tokens = 6, .top_p = 0.8, .top_p_decay = 0.7, .top_p_bound = 0.3, .seed = 5};
  all["both"] = {.max_new_tokens = 6, .top_k = 20, .top_p = 0.8, .repetition_penalty = 1.3, .seed = 5};
  all["beams"] = {.max_new_tokens = 6, .stop_tokens = {1, 7}, .num_beams = 3, .num_return = 2};
  all["megatron"] = {.max_new_tokens = 6,
                     .stop_tokens = {7},
                     .num_beams = 3,
                     .length_penalty = 1.5,
                     .beam_rule = BeamRule::megatron};
  all["penalised beams"] = {.max_new_tokens = 5,
                            .min_new_tokens = 3,
                            .repetition_penalty = 1.5,
                            .stop_tokens = {7},
                            .num_beams = 2,
                            .early_stopping = EarlyStopping::yes};
  return all;
}

std::map<std::string, std::vector<Generated>> texts_of(Engine& engine, std::int64_t batch,
                                                       std::int64_t chunk) {
  std::map<std::string, std::vector<Generated>> texts;
  Generator generator(engine);
  for (auto [name, options] : ways(engine.model())) {
    options.batch_size = batch;
    options.prefill_chunk = chunk;
    texts[name] = generator.run(kPrompts, options);
  }
  return texts;
}

class GenerateLayout : public ::testing::TestWithParam<NamedLayout> {};

TEST_P(GenerateLayout, WritesTheSameTexts) {
  const NamedLayout& layout = GetParam();
  const auto serial = build_engine(edge_config(layout.family, {}), false);
  const auto expected = texts_of(*serial, 0, 512);
  run_ranks(layout.ranks, {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
    const Config config = edge_config(layout.family, layout.overrides);
    const auto engine =
        build_engine(config, config.parallel.zero_stage == 3, world);  // who trains shares weights
    for (const auto& [batch, chunk] : {std::pair(0, 512), std::pair(2, 3)}) {
      const auto texts = texts_of(*engine, batch, chunk);
      for (const auto& [name, all] : expected)
        expect_same(texts.at(name), all, name + ", batch " + std::to_string(batch));
    }
  });
}

const Family kT5{"t5"}, kMegatronT5{"megatron_t5"};

const NamedLayout kLayouts[] = {
    {"one", Family::gpt2, {}, 1},
    {"tp2", Family::gpt2, kTp2, 2},
    {"tp2_sp", Family::llama, kTp2Sp, 2},
    {"tp4", Family::llama, {"parallel.tensor=4"}, 4},
    {"pp2", Family::gpt2, kPp2, 2},
    {"pp4", Family::llama, {"parallel.pipeline=4"}, 4},
    {"interleaved",
     Family::gpt2,
     {"parallel.pipeline=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved"},
     2},
    {"zb_v", Family::llama, {"parallel.pipeline=2", "parallel.schedule=zb-v"}, 2},
    {"dp2", Family::gpt2, {"parallel.data=2"}, 2},
    {"tp2_pp2", Family::gpt2, {"parallel.tensor=2", "parallel.pipeline=2"}, 4},
    {"tp2_dp2", Family::llama, {"parallel.tensor=2", "parallel.data=2"}, 4},
    {"dp8", Family::gpt2, {"parallel.data=8"}, 8},
    {"tp2_pp2_dp2",
     Family::llama,
     {"parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.data=2"},
     8},
    {"shared_weights", Family::gpt2, {"parallel.data=2", "parallel.pipeline=2", "parallel.zero_stage=3"}, 4},
    {"recompute", Family::gpt2, {"parallel.pipeline=2", "training.recompute=full"}, 2},
    {"t5", kT5, {}, 1},
    {"t5_tp2_sp", kT5, kTp2Sp, 2},
    {"t5_pp2", kT5, kPp2, 2},
    {"t5_pp4", kT5, {"parallel.pipeline=4"}, 4},
    {"t5_zb_v", kT5, kZbV, 2},
    {"t5_all", kT5, kAll, 8},
    {"t5_shared_weights", kT5, {"parallel.data=2", "parallel.zero_stage=3"}, 2},
    {"megatron_t5_tp2_pp2",
     kMegatronT5,
     {"parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"},
     4},
};
INSTANTIATE_TEST_SUITE_P(All, GenerateLayout, ::testing::ValuesIn(kLayouts),
                         [](const auto& info) { return info.param.name; });

/// What the same prompts give alone, one after the other, is what they give together.
TEST(GenerateBatch, APromptsTextDoesNotDependOnItsNeighbours) {
  const auto engine = build_engine(edge_config(Family::llama, {}), false);
  Generator generator(*engine);
  for (const auto& [name, options] : ways(engine->model())) {
    const auto together = generator.run(kPrompts, options);
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      GenerationOptions own = options;
      own.first_sample = i * static_cast<std::size_t>(options.num_samples);
      expect_same(generator.run({kPrompts[i]}, own), {together[i]}, name);
    }
  }
}

TEST(GenerateErrors, ReachEveryRank) {
  for (const Overrides& layout : {kTp2, kPp2, Overrides{"parallel.data=2"}}) {
    run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(edge_config(Family::gpt2, layout), false, world);
      Generator generator(*engine);
      expect_error<InvalidArgument>([&] { generator.run({{1}, {}}, {}); }, "at least one token", "prompt 1");
      expect_error<InvalidArgument>([&] { generator.run({{1, kVocab}}, {}); }, "outside the vocabulary");
      expect_error<InvalidArgument>([&] { generator.run({std::vector<std::int32_t>(17, 1)}, {}); }, "17",
                                    "16");
      expect_error<InvalidArgument>([&] { generator.run({{1}}, {.top_p = 2.0}); }, "top_p");
      expect_error<InvalidArgument>([&] { generator.run({{1}}, {.stop_tokens = {-1}}); }, "stop token -1");
      expect_error<InvalidArgument>([&] { generator.run({{1 + world->rank()}}, {}); }, "rank 1",
                                    "every rank");
      const GenerationOptions failing{.max_new_tokens = 4, .stop = [](std::span<const std::int32_t>) -> bool {
                                        throw DataError("no such text");
                                      }};
      expect_error<InvalidArgument>([&] { generator.run({{1}, {2}, {3}}, failing); }, "no such text");
      // Afterwards all is well.
      EXPECT_EQ(generator.run({{1}}, {.max_new_tokens = 3}).at(0).at(0).tokens.size(), 3u);
      for (Parameter* p : engine->params().parameters()) {
        if (p->name().find("final_layernorm.weight") != std::string::npos)
          ops::fill_constant(engine->ctx(), p->main(), std::numeric_limits<float>::quiet_NaN());
      }
      for (const std::int64_t top_k : {0, 1, 5})
        expect_error<InvalidArgument>(
            [&] {
              generator.run({{1}, {2, 3}, {4}}, {.top_k = top_k});
            },
            "not finite");
      expect_error<InvalidArgument>([&] { generator.run({{1}, {2}}, {.num_beams = 2}); }, "not finite");
    });
  }
}

TEST(GenerateErrors, NoTokenLeft) {
  Config config = edge_config(Family::gpt2, {});
  const auto engine = build_engine(config, false);
  std::vector<std::int32_t> all;
  for (std::int32_t token = 0; token < kVocab; ++token) all.push_back(token);
  for (const std::int64_t top_k : {0, 1, 5}) {
    expect_error<InvalidArgument>(
        [&] { Generator(*engine).run({{1}}, {.min_new_tokens = 1, .top_k = top_k, .stop_tokens = all}); },
        "no token is left");
  }
}

}  // namespace
}  // namespace tessera::test
