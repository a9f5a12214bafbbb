/// Texts of several pages: what samples and beams share is theirs as if each had it alone, and memory follows
/// what texts have.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "tessera/engine/generate.hpp"
#include "tests/engine/layout_edge_support.hpp"

namespace tessera::test {
namespace {

using namespace edge;
using Prompts = std::vector<std::vector<std::int32_t>>;

Config long_config(const Config& config) { return with_overrides(config, {"model.max_positions=400"}); }

std::vector<std::int32_t> tokens_of(std::size_t count, unsigned seed, std::int32_t vocab) {
  std::mt19937 generator(seed);
  std::vector<std::int32_t> tokens(count);
  for (auto& token : tokens) token = static_cast<std::int32_t>(generator() % static_cast<unsigned>(vocab));
  return tokens;
}

/// Ends of texts and of chunks that lie within pages and between them.
Prompts prompts_of(std::int32_t vocab) {
  Prompts prompts;
  for (const std::size_t length : {130u, 5u, 70u, 64u, 65u, 1u, 128u})
    prompts.push_back(tokens_of(length, static_cast<unsigned>(length), vocab));
  return prompts;
}

/// Ranks round otherwise than one process does; what a text reads of another is far more.
void expect_same_texts(const Generated& got, const Generated& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].tokens, expected[i].tokens) << what << ", text " << i;
    EXPECT_NEAR(got[i].score, expected[i].score, 1e-4) << what;
    ASSERT_EQ(got[i].logprobs.size(), expected[i].logprobs.size()) << what;
    for (std::size_t t = 0; t < got[i].logprobs.size(); ++t)
      EXPECT_NEAR(got[i].logprobs[t], expected[i].logprobs[t], 1e-3)
          << what << ", text " << i << ", token " << t;
  }
}

TEST(PagedCache, SamplesThatShareAPromptAreThoseOfItAlone) {
  const auto engine = build_engine(long_config(tiny_llama()), false);
  Generator generator(*engine);
  const Prompts prompts = prompts_of(257);
  const GenerationOptions options{.max_new_tokens = 70,
                                  .seed = 5,
                                  .num_samples = 3,
                                  .logprobs = true,
                                  .batch_size = 8,
                                  .prefill_chunk = 50};
  const auto together = generator.run(prompts, options);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    for (std::uint64_t sample = 0; sample < 3; ++sample) {
      GenerationOptions alone = options;
      alone.first_sample = 3 * i + sample;
      alone.num_samples = 1;
      alone.prefill_chunk = 512;
      expect_same_texts(generator.run({prompts[i]}, alone).at(0), {together[i].at(sample)},
                        "prompt " + std::to_string(i) + ", sample " + std::to_string(sample));
    }
  }
}

/// The score of each text is that of one pass over the whole of it.
TEST(PagedCache, BeamsHaveTheKeysOfTheirOwnTexts) {
  Config windowed = tiny_llama();
  windowed.model.sliding_window = 40;
  for (const Config& config : {tiny_config(), tiny_llama(), windowed}) {
    const auto engine = build_engine(long_config(config), false);
    const Prompts prompts = prompts_of(257);
    const auto texts = Generator(*engine).run(
        prompts, {.max_new_tokens = 75, .num_beams = 4, .num_return = 4, .prefill_chunk = 50});
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      ASSERT_EQ(texts[i].size(), 4u);
      for (const GeneratedText& text : texts[i]) {
        ASSERT_EQ(text.tokens.size(), 75u);
        std::vector<std::int32_t> all = prompts[i];
        all.insert(all.end(), text.tokens.begin(), text.tokens.end());
        const Batch batch{.batch = 1,
                          .seq_length = static_cast<std::int64_t>(all.size()) - 1,
                          .tokens = {all.begin(), all.end() - 1},
                          .labels = {all.begin() + 1, all.end()}};
        const auto losses = engine->forward(batch, Engine::Output::token_losses, false).output.to_floats();
        const double sum = std::accumulate(losses.end() - 75, losses.end(), 0.0);
        EXPECT_NEAR(text.score, -sum / 75, 1e-4) << "prompt " << i;
      }
    }
  }
}

TEST(PagedCache, EveryLayoutHasTheSamePages) {
  const Prompts prompts = prompts_of(kVocab);
  const std::vector<GenerationOptions> ways = {
      {.max_new_tokens = 70,
       .seed = 2,
       .num_samples = 2,
       .logprobs = true,
       .batch_size = 5,
       .prefill_chunk = 40},
      {.max_new_tokens = 70, .num_beams = 3, .num_return = 2, .batch_size = 4}};
  for (const Family family : {Family(Family::llama), Family("t5")}) {
    const auto serial = build_engine(long_config(edge_config(family, {})), false);
    for (const Overrides& layout : {kTp2, kPp2}) {
      run_ranks(2, {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
        const auto engine = build_engine(long_config(edge_config(family, layout)), false, world);
        Generator generator(*engine);
        for (const GenerationOptions& options : ways) {
          const auto texts = generator.run(prompts, options);
          if (world->rank() > 0) continue;
          const auto expected = Generator(*serial).run(prompts, options);
          for (std::size_t i = 0; i < prompts.size(); ++i)
            expect_same_texts(texts[i], expected[i], layout[0] + ", prompt " + std::to_string(i));
        }
      });
    }
  }
}

TEST(PagedCache, MemoryFollowsWhatTextsHave) {
  const auto engine = build_engine(long_config(tiny_llama()), false);
  const auto used = [&] { return static_cast<std::int64_t>(engine->ctx().allocator->stats().used_bytes); };
  Prompts prompts(15, {1, 2, 3});
  prompts.push_back(tokens_of(300, 1, 257));
  const std::int64_t before = used();
  std::int64_t most = 0;
  Generator(*engine).run(prompts, {.max_new_tokens = 40, .on_token = [&](auto, auto, auto) {
                                     most = std::max(most, used() - before);
                                   }});
  // Keys and values of 2 layers, 2 heads of 4 floats.
  const std::int64_t page = kCachePage * 2 * 2 * 2 * 4 * 4;
  EXPECT_GE(most, 21 * page);      // 6 pages of one text, one of each other
  EXPECT_LT(most, 21 * page * 2);  // pools grow by half; logits and what else a pass has
}

/// Samples of a long prompt have it once.
TEST(PagedCache, SharedPagesAreThereOnce) {
  const auto engine = build_engine(long_config(tiny_llama()), false);
  const auto used = [&] { return static_cast<std::int64_t>(engine->ctx().allocator->stats().used_bytes); };
  const std::int64_t before = used();
  std::int64_t last = 0;
  Generator(*engine).run({tokens_of(310, 1, 257)},
                         {.max_new_tokens = 8, .num_samples = 16, .on_token = [&](auto, auto, auto) {
                            last = used() - before;
                          }});
  const std::int64_t page = kCachePage * 2 * 2 * 2 * 4 * 4;
  EXPECT_LT(last, (4 + 16) * page * 2) << "4 pages in common, one of each text, and pools that grow by half";
}

}  // namespace
}  // namespace tessera::test
