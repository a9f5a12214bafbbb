/// Scores are those of one process on every layout; what goes wrong is told on every rank.

#include "tessera/engine/score.hpp"

#include <cmath>
#include <limits>

#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {
namespace {

using namespace edge;

const std::vector<TextToScore> kTexts = {{{3, 1, 4, 1, 5}, 1},
                                         {{9, 2}, 1},
                                         {{5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8}, 4},
                                         {{6, 2, 6}, 2},
                                         {{1, 2, 3, 4}, 3}};

class ScoreLayout : public ::testing::TestWithParam<NamedLayout> {};

TEST_P(ScoreLayout, EqualsOneProcessAndTheLosses) {
  const NamedLayout& layout = GetParam();
  const auto serial = build_engine(edge_config(layout.family, {}), false);
  std::vector<std::vector<float>> expected;  // one text at a time, by the losses of its tokens
  for (const TextToScore& text : kTexts) {
    const auto length = static_cast<std::int64_t>(text.tokens.size()) - 1;
    const Batch batch{.batch = 1,
                      .seq_length = length,
                      .tokens = {text.tokens.begin(), text.tokens.end() - 1},
                      .labels = {text.tokens.begin() + 1, text.tokens.end()}};
    auto losses = serial->forward(batch, Engine::Output::token_losses, false).output.to_floats();
    losses.erase(losses.begin(), losses.begin() + text.first - 1);
    for (float& loss : losses) loss = -loss;
    expected.push_back(std::move(losses));
  }
  run_ranks(layout.ranks, {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
    const auto engine = build_engine(edge_config(layout.family, layout.overrides), false, world);
    for (const bool likeliest : {false, true}) {
      std::int64_t told = 0;
      const auto scores = score_texts(
          *engine, kTexts, {.likeliest = likeliest, .on_progress = [&](auto done) { told = done; }});
      ASSERT_EQ(scores.size(), kTexts.size());
      EXPECT_EQ(told, static_cast<std::int64_t>(kTexts.size()));
      for (std::size_t i = 0; i < scores.size(); ++i) {
        ASSERT_EQ(scores[i].logprobs.size(), expected[i].size());
        for (std::size_t t = 0; t < expected[i].size(); ++t)
          EXPECT_NEAR(scores[i].logprobs[t], expected[i][t], 1e-5 * std::abs(expected[i][t])) << i;
      }
    }
  });
}

const NamedLayout kLayouts[] = {
    {"one", Family::gpt2, {}, 1},
    {"tp2_sp", Family::llama, kTp2Sp, 2},
    {"pp2", Family::gpt2, kPp2, 2},
    {"dp8", Family::gpt2, {"parallel.data=8"}, 8},
    {"all", Family::llama, kAll, 8},
    {"recompute", Family::gpt2, {"parallel.pipeline=2", "training.recompute=full"}, 2}};
INSTANTIATE_TEST_SUITE_P(All, ScoreLayout, ::testing::ValuesIn(kLayouts),
                         [](const auto& info) { return info.param.name; });

TEST(Score, ErrorsReachEveryRank) {
  for (const Overrides& layout : {kTp2, kPp2, Overrides{"parallel.data=2"}}) {
    run_ranks(2, {.timeout_s = 60}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(edge_config(Family::gpt2, layout), false, world);
      const auto scored = [&](std::vector<TextToScore> texts) { return score_texts(*engine, texts); };
      expect_error<InvalidArgument>([&] { scored({{{1, 2}, 2}}); }, "text 0", "from token 2");
      expect_error<InvalidArgument>([&] { scored({{{1, kVocab}, 1}}); }, "outside the vocabulary");
      expect_error<InvalidArgument>([&] { scored({{std::vector<std::int32_t>(18, 1), 1}}); }, "16 positions");
      expect_error<InvalidArgument>([&] { scored({{{1, 2 + world->rank()}, 1}}); }, "rank 1", "other texts");
      EXPECT_EQ(scored({{std::vector<std::int32_t>(17, 1), 1}}).at(0).logprobs.size(), 16u);
      EXPECT_TRUE(scored({}).empty());
      for (Parameter* p : engine->params().parameters()) {
        if (p->name().find("final_layernorm.weight") != std::string::npos)
          ops::fill_constant(engine->ctx(), p->main(), std::numeric_limits<float>::quiet_NaN());
      }
      expect_error<TrainingError>([&] { scored(kTexts); }, "not numbers");
    });
  }
  const auto t5 = build_engine(edge_config(Family{"t5"}, {}), false);
  expect_error<InvalidArgument>([&] { score_texts(*t5, kTexts); }, "one stack");
}

}  // namespace
}  // namespace tessera::test
