/// Drawing tokens: distributions, limits, errors; and generation with a cache against full forwards.

#include "tessera/engine/generate.hpp"

#include <limits>

#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_error;

const std::vector<float> kLogits = {0.5f, 2.0f, -1.0f, 1.5f, 0.0f, 2.0f};

/// Probabilities after temperature and after keeping the tokens in `kept`.
std::vector<double> probabilities(double temperature, const std::vector<std::size_t>& kept) {
  std::vector<double> p(kLogits.size(), 0.0);
  double sum = 0.0;
  for (const std::size_t i : kept) sum += p[i] = std::exp(static_cast<double>(kLogits[i]) / temperature);
  for (double& v : p) v /= sum;
  return p;
}

/// An evenly spaced `uniform` must hit each token exactly as often as it is likely.
void expect_distribution(const GenerationOptions& options, const std::vector<double>& expected) {
  constexpr int n = 10000;
  std::vector<int> counts(kLogits.size(), 0);
  for (int i = 0; i < n; ++i)
    ++counts[static_cast<std::size_t>(sample_token(kLogits, options, (i + 0.5) / n))];
  for (std::size_t t = 0; t < counts.size(); ++t)
    EXPECT_NEAR(counts[t], n * expected[t], 1.01) << "token " << t;
}

TEST(SampleToken, FollowsTheDistribution) {
  expect_distribution({}, probabilities(1.0, {0, 1, 2, 3, 4, 5}));
  expect_distribution({.temperature = 0.5}, probabilities(0.5, {0, 1, 2, 3, 4, 5}));
  expect_distribution({.temperature = 3.0}, probabilities(3.0, {0, 1, 2, 3, 4, 5}));
  expect_distribution({.top_k = 3}, probabilities(1.0, {1, 3, 5}));
  expect_distribution({.temperature = 2.0, .top_k = 4}, probabilities(2.0, {0, 1, 3, 5}));
  expect_distribution({.top_k = 99}, probabilities(1.0, {0, 1, 2, 3, 4, 5}));
  expect_distribution({.top_p = 1.0}, probabilities(1.0, {0, 1, 2, 3, 4, 5}));
  // 0.338, 0.338, 0.205, ...: the token that crosses 0.7 stays
  expect_distribution({.top_p = 0.7}, probabilities(1.0, {1, 3, 5}));
  expect_distribution({.top_p = 0.5}, probabilities(1.0, {1, 5}));
  expect_distribution({.top_p = 0.01}, probabilities(1.0, {1}));
}

TEST(SampleToken, GreedyTakesTheFirstOfTheLikeliest) {
  for (const double uniform : {0.0, 0.5, 0.999}) {
    EXPECT_EQ(sample_token(kLogits, {.temperature = 0.0}, uniform), 1);
    EXPECT_EQ(sample_token(kLogits, {.top_k = 1}, uniform), 1);
    EXPECT_EQ(sample_token(std::vector<float>{3.0f}, {}, uniform), 0);
  }
  EXPECT_EQ(sample_token(kLogits, {.temperature = 1e-300}, 0.25), 1);
}

TEST(SampleToken, NotANumberIsAnErrorNotACrash) {
  std::vector<float> logits(1000, std::nanf(""));
  logits[3] = 1.0f;
  for (const GenerationOptions& options : {GenerationOptions{}, GenerationOptions{.temperature = 0.0}}) {
    expect_error<InvalidArgument>([&] { sample_token(logits, options, 0.5); }, "not finite");
  }
}

TEST(SampleToken, RefusesOptionsThatMakeNoSense) {
  expect_error<InvalidArgument>([] { check({.top_p_decay = 0.5}); }, "top_p_decay");
  expect_error<InvalidArgument>([] { check({.top_p = 0.5, .top_p_decay = 0.5, .top_p_bound = 0.6}); },
                                "top_p_bound");
  expect_error<InvalidArgument>([] { check({.repetition_penalty = 0.0}); }, "repetition_penalty");
  expect_error<InvalidArgument>([] { check({.num_beams = 0}); }, "num_beams");
  expect_error<InvalidArgument>([] { check({.num_beams = 2, .num_return = 3}); }, "num_return");
  expect_error<InvalidArgument>([] { check({.num_samples = 2, .num_beams = 2}); }, "num_samples");
  expect_error<InvalidArgument>([] { check({.batch_size = -1}); }, "batch_size");
  expect_error<InvalidArgument>([] { check({.top_p = 1.5}); }, "1.5");
  expect_error<InvalidArgument>([] { check({.top_p = -0.1}); }, "-0.1");
  expect_error<InvalidArgument>([] { check({.top_k = -2}); }, "-2");
  expect_error<InvalidArgument>([] { check({.temperature = -1.0}); }, "-1");
  expect_error<InvalidArgument>([] { check({.temperature = std::numeric_limits<double>::quiet_NaN()}); },
                                "temperature");
  expect_error<InvalidArgument>([] { check({.top_p = std::numeric_limits<double>::quiet_NaN()}); }, "top_p");
  expect_error<InvalidArgument>([] { check({.max_new_tokens = -1}); }, "max_new_tokens");
  expect_error<InvalidArgument>([] { check({.max_new_tokens = 5, .min_new_tokens = 6}); },
                                "min_new_tokens (6)", "max_new_tokens (5)");
}

/// Always the same logits, whatever the text.
class Constant final : public Model {
 public:
  Var forward(const Forward& forward) override {
    std::vector<float> rows;
    const std::int64_t count = forward.input.seq_length * forward.input.batch;
    positions += count;
    for (std::int64_t i = 0; i < count; ++i) rows.insert(rows.end(), kLogits.begin(), kLogits.end());
    return Tensor::from(forward.exec, rows, {count, vocab_size()});
  }
  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(kLogits.size()); }
  std::int64_t max_positions() const override { return 100000; }
  KvCache make_cache(const ExecCtx&, std::int64_t, std::int64_t, std::int64_t) const override { return {}; }
  void check_generates(std::int64_t) const override {}
  std::int64_t positions = 0;  ///< computed so far
};

/// New tokens after one prompt.
std::vector<std::int32_t> generate(const ExecCtx& ctx, Model& model, const std::vector<std::int32_t>& prompt,
                                   const GenerationOptions& options) {
  return Generator(ctx, model).run({prompt}, options).at(0).at(0).tokens;
}

std::vector<std::int32_t> draw(std::int64_t count, const GenerationOptions& sampling) {
  Constant model;
  GenerationOptions options = sampling;
  options.max_new_tokens = count;
  return generate(test::context(1), model, std::vector<std::int32_t>{0}, options);
}

TEST(Generate, DrawsAreIndependentAndUniform) {
  constexpr int n = 4000;
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const auto tokens = draw(n, {.seed = seed});
    const auto p = probabilities(1.0, {0, 1, 2, 3, 4, 5});
    std::vector<double> single(6, 0.0), pairs(36, 0.0);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      single[static_cast<std::size_t>(tokens[i])] += 1.0;
      if (i > 0) pairs[static_cast<std::size_t>(tokens[i - 1] * 6 + tokens[i])] += 1.0;
    }
    double chi2 = 0.0, chi2_pairs = 0.0;
    for (std::size_t a = 0; a < 6; ++a) {
      chi2 += std::pow(single[a] - n * p[a], 2.0) / (n * p[a]);
      for (std::size_t b = 0; b < 6; ++b) {
        const double expected = (n - 1) * p[a] * p[b];
        chi2_pairs += std::pow(pairs[a * 6 + b] - expected, 2.0) / expected;
      }
    }
    EXPECT_LT(chi2, 20.5) << seed;        // 5 degrees of freedom, 1 in 1000
    EXPECT_LT(chi2_pairs, 73.0) << seed;  // 35 degrees of freedom, 1 in 5000
  }
}

TEST(Generate, TheSeedDecides) {
  EXPECT_EQ(draw(50, {.seed = 5}), draw(50, {.seed = 5}));
  EXPECT_NE(draw(50, {.seed = 5}), draw(50, {.seed = 6}));
  const auto longer = draw(80, {.seed = 5});
  EXPECT_EQ(draw(50, {.seed = 5}), (std::vector<std::int32_t>(longer.begin(), longer.begin() + 50)));
}

TEST(Generate, SamplesOfAPromptReadItOnce) {
  Constant model;
  const ExecCtx ctx = test::context(1);
  Generator generator(ctx, model);
  const auto texts = generator.run({{0, 1, 2, 3, 4}, {5, 0}}, {.max_new_tokens = 1, .num_samples = 5});
  EXPECT_EQ(model.positions, 2 * 5);  // both prompts, the shorter one padded
  EXPECT_EQ(texts[1].size(), 5u);
  generator.run({{0, 1, 2, 3, 4}}, {.max_new_tokens = 3, .num_samples = 5});
  EXPECT_EQ(model.positions, 2 * 5 + 5 + 2 * 5);
}

TEST(Generate, EndsAtTheStopTokenOrWhenTold) {
  const auto all = draw(200, {.seed = 5});
  const auto first_two = std::find(all.begin(), all.end(), 2);
  ASSERT_NE(first_two, all.end());
  // The stop token is the last one.
  EXPECT_EQ(draw(200, {.seed = 5, .stop_tokens = {2}}),
            (std::vector<std::int32_t>(all.begin(), first_two + 1)));
  EXPECT_EQ(draw(10, {.temperature = 0.0, .stop_tokens = {1}}), std::vector<std::int32_t>{1});
  EXPECT_TRUE(draw(0, {}).empty());

  Constant model;
  std::vector<std::int32_t> seen;
  const GenerationOptions options{
      .max_new_tokens = 200,
      .seed = 5,
      .stop = [](std::span<const std::int32_t> text) { return text.size() == 4; },
      .on_token = [&](std::int64_t, std::int64_t, std::int32_t token) { seen.push_back(token); }};
  const auto tokens = generate(test::context(1), model, std::vector<std::int32_t>{0}, options);
  EXPECT_EQ(tokens, seen);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>(all.begin(), all.begin() + 4)));
}

/// What generation without a cache gives: the whole text again for every token.
std::vector<std::int32_t> greedy_by_full_forwards(Engine& engine, std::vector<std::int32_t> text,
                                                  std::size_t count) {
  const std::size_t prompt = text.size();
  while (text.size() < prompt + count) {
    Batch batch;
    batch.batch = 1;
    batch.seq_length = static_cast<std::int64_t>(text.size());
    batch.tokens = text;
    const std::vector<float> logits = engine.forward(batch, Engine::Output::logits).output.to_floats();
    engine.discard();
    const auto last = logits.end() - engine.model().vocab_size();
    text.push_back(static_cast<std::int32_t>(std::max_element(last, logits.end()) - last));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt), text.end()};
}

TEST(Generate, GreedyIsTheSameWithAndWithoutCache) {
  const std::vector<std::int32_t> prompt = {5, 200, 5};
  for (const Config& config : {test::tiny_config(), test::tiny_llama()}) {
    const auto engine = build_engine(config);
    for (unsigned i = 0; i < 5; ++i) engine->step(test::random_batch(4, 11, i));
    const GenerationOptions greedy{.max_new_tokens = 9, .temperature = 0.0};
    EXPECT_EQ(generate(engine->ctx(), engine->model(), prompt, greedy),
              greedy_by_full_forwards(*engine, prompt, 9));
  }
}

/// Late tokens are computed in the memory of those before them, while the cache has room.
TEST(Generate, ATokenAsksTheSystemForNothing) {
  Config config = test::tiny_llama();
  config.model.max_positions = 200;
  const auto engine = build_engine(config, false);
  std::vector<std::uint64_t> asked;
  std::vector<std::size_t> used;
  const GenerationOptions options{.max_new_tokens = 125,
                                  .on_token = [&](std::int64_t prompt, std::int64_t, std::int32_t) {
                                    if (prompt > 0) return;
                                    const AllocatorStats stats = engine->ctx().allocator->stats();
                                    asked.push_back(stats.system_allocations);
                                    used.push_back(stats.used_bytes);
                                  }};
  Generator(*engine).run({{5, 200, 5}, {7}}, options);
  ASSERT_EQ(asked.size(), 125u);
  EXPECT_EQ(asked[60], asked[115]);
  EXPECT_EQ(used[60], used[115]);
}

TEST(Generate, EndsAtTheLastPosition) {
  const auto engine = build_engine(test::tiny_config(), false);  // 16 positions
  const auto count = [&](std::size_t prompt, std::int64_t wanted) {
    return generate(engine->ctx(), engine->model(), std::vector<std::int32_t>(prompt, 7),
                    {.max_new_tokens = wanted})
        .size();
  };
  EXPECT_EQ(count(10, 100), 6u);
  EXPECT_EQ(count(10, std::numeric_limits<std::int64_t>::max()), 6u);
  EXPECT_EQ(count(16, 100), 0u);
  EXPECT_EQ(count(1, 3), 3u);
  expect_error<InvalidArgument>([&] { count(17, 1); }, "17", "16");
}

TEST(Generate, RefusesPromptsItCannotContinue) {
  const auto engine = build_engine(test::tiny_config(), false);
  const auto from = [&](std::vector<std::int32_t> prompt) {
    return [&engine, prompt] { generate(engine->ctx(), engine->model(), prompt, {}); };
  };
  expect_error<InvalidArgument>(from({}), "at least one token");
  expect_error<InvalidArgument>(from({1, 257}), "257");
  expect_error<InvalidArgument>(from({-1}), "-1");
}

}  // namespace
}  // namespace tessera
