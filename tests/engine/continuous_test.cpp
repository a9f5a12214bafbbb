/// Requests that come and go while others are computed get the texts they would get alone, on every layout.

#include "tessera/engine/continuous.hpp"

#include <algorithm>
#include <iterator>
#include <map>

#include "tests/engine/layout_edge_support.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {
namespace {

using namespace edge;

/// By id; drawn ones of each kind, several texts, probabilities, beams, one that gets no tokens.
std::map<std::uint64_t, TextRequest> requests() {
  std::map<std::uint64_t, TextRequest> all;
  const auto add = [&](std::vector<std::int32_t> prompt, const GenerationOptions& options) {
    const std::uint64_t id = all.size() + 10;
    all[id] = {id, std::move(prompt), options};
  };
  add({3, 1, 4, 1, 5}, {.max_new_tokens = 9, .temperature = 0});
  add({9},
      {.max_new_tokens = 6, .top_p = 0.8, .seed = 3, .num_samples = 3, .logprobs = true, .top_logprobs = 2});
  add({2, 6}, {.max_new_tokens = 12, .temperature = 0.7, .top_k = 9, .repetition_penalty = 1.2, .seed = 4});
  add({5, 3, 5, 8, 9, 7}, {.max_new_tokens = 4, .num_beams = 3, .num_return = 2});
  add({3, 8}, {.max_new_tokens = 0, .logprobs = true, .prompt_logprobs = true, .top_logprobs = 3});
  add({3, 8, 1}, {.max_new_tokens = 0});
  add({7, 7}, {.max_new_tokens = 5, .seed = 9, .stop_tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9}});
  return all;
}

using Texts = std::map<std::uint64_t, std::map<std::int64_t, GeneratedText>>;

void add_news(Texts& texts, const std::vector<TextNews>& news) {
  for (const TextNews& each : news) {
    EXPECT_EQ(each.failure, "");
    GeneratedText& text = texts[each.id][each.sample];
    std::ranges::copy(each.text.tokens, std::back_inserter(text.tokens));
    std::ranges::copy(each.text.logprobs, std::back_inserter(text.logprobs));
    std::ranges::copy(each.text.top_logprobs, std::back_inserter(text.top_logprobs));
    text.stopped = each.text.stopped;
    text.score = each.text.score;
  }
}

/// One request a round, and one that is cancelled after its first news. On rank 0.
Texts serve(ContinuousGenerator& generator, Communicator& world) {
  Texts texts;
  if (world.rank() != 0) {
    while (!generator.round({}).end) continue;
    return texts;
  }
  const auto all = requests();
  auto next = all.begin();
  constexpr std::uint64_t kGone = 1;
  generator.round({{{kGone, {4, 2}, {.max_new_tokens = 30, .temperature = 0}}}, {}, false});
  bool cancelled = false, busy = true;
  while (busy || next != all.end()) {
    ContinuousGenerator::Orders orders;
    if (next != all.end()) orders.requests.push_back((next++)->second);
    if (!cancelled && texts.contains(kGone)) {
      orders.cancelled = {kGone};
      cancelled = true;
      texts.erase(kGone);
    }
    const auto round = generator.round(orders);
    add_news(texts, round.news);
    busy = round.busy;
  }
  EXPECT_TRUE(cancelled);
  EXPECT_FALSE(texts.contains(kGone)) << "news of a request that was cancelled";
  generator.round({{}, {}, true});
  return texts;
}

void expect_same(const Texts& got, const Texts& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [id, samples] : expected) {
    ASSERT_EQ(got.at(id).size(), samples.size()) << id;
    for (const auto& [sample, b] : samples) {
      const GeneratedText& a = got.at(id).at(sample);
      EXPECT_EQ(a.tokens, b.tokens) << "request " << id << ", sample " << sample;
      EXPECT_EQ(a.stopped, b.stopped) << id;
      EXPECT_NEAR(a.score, b.score, 1e-4) << id;
      ASSERT_EQ(a.logprobs.size(), b.logprobs.size()) << id;
      for (std::size_t t = 0; t < a.logprobs.size(); ++t)
        EXPECT_NEAR(a.logprobs[t], b.logprobs[t], 1e-4) << id;
      ASSERT_EQ(a.top_logprobs.size(), b.top_logprobs.size()) << id;
      for (std::size_t t = 0; t < a.top_logprobs.size(); ++t) {
        ASSERT_EQ(a.top_logprobs[t].size(), b.top_logprobs[t].size()) << id;
        for (std::size_t k = 0; k < a.top_logprobs[t].size(); ++k) {
          EXPECT_EQ(a.top_logprobs[t][k].token, b.top_logprobs[t][k].token) << id;
          EXPECT_NEAR(a.top_logprobs[t][k].logprob, b.top_logprobs[t][k].logprob, 1e-4) << id;
        }
      }
    }
  }
}

/// Each request alone, by Generator.
Texts one_by_one(Engine& engine) {
  Generator generator(engine);
  Texts texts;
  for (const auto& [id, request] : requests()) {
    const Generated all = generator.run({request.prompt}, request.options).at(0);
    for (std::size_t s = 0; s < all.size(); ++s) texts[id][static_cast<std::int64_t>(s)] = all[s];
  }
  return texts;
}

TEST(ContinuousGenerator, TextsDependOnTheirRequestAlone) {
  const auto serial = build_engine(edge_config(Family::llama, {}), false);
  const Texts expected = one_by_one(*serial);
  for (const Overrides& overrides : {Overrides(), kTp2, kPp2, Overrides{"parallel.data=2"}, kTp2 + kPp2}) {
    const int ranks = 1 << overrides.size();
    run_ranks(ranks, {.timeout_s = 120}, [&](std::shared_ptr<Communicator> world) {
      const auto engine = build_engine(edge_config(Family::llama, overrides), false, world);
      for (const std::int64_t batch : {1, 4}) {
        ContinuousGenerator generator(*engine, {.batch_size = batch, .prefill_chunk = 3});
        const Texts texts = serve(generator, *world);
        if (world->rank() == 0) expect_same(texts, expected);
      }
    });
  }
}

TEST(ContinuousGenerator, RefusesWhatCannotBe) {
  const auto engine = build_engine(edge_config(Family::llama, {}), false);
  ContinuousGenerator generator(*engine, {});
  expect_refusal([&] { generator.check({1, {}, {}}); }, "at least one token");
  expect_refusal([&] { generator.check({1, {100000}, {}}); }, "outside the vocabulary");
  expect_refusal([&] { generator.check({1, {3}, {.top_logprobs = 2}}); }, "top_logprobs");
  expect_refusal([&] { generator.check({1, {3}, {.stop = [](auto) { return true; }}}); }, "stop");
  expect_refusal([&] { ContinuousGenerator(*engine, {.batch_size = 0}); }, "batch_size");
}

}  // namespace
}  // namespace tessera::test
