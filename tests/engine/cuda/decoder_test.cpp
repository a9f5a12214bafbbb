/// Tokens drawn on a GPU, and decoding passes as graphs, against the CPU.

#include <random>

#include "tessera/engine/build.hpp"
#include "tessera/engine/continuous.hpp"
#include "tessera/engine/generate.hpp"
#include "tessera/ops/sampling.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"
#if __has_include("emulator.hpp")
#include "emulator.hpp"
#endif

namespace tessera::test {
namespace {

class DeviceDecoder : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs a CUDA device";
  }
};

/// The token of the device for each rule, with its log-probability and what failed.
std::vector<DrawnToken> drawn_by_device(const std::vector<std::vector<float>>& logits,
                                        const std::vector<SamplingRow>& rules,
                                        const std::vector<std::int32_t>& seen = {},
                                        const std::vector<std::int32_t>& stops = {}) {
  const ExecCtx ctx = ExecCtx::cuda();
  const auto n = static_cast<std::int64_t>(logits.size()),
             vocab = static_cast<std::int64_t>(logits[0].size());
  std::vector<float> all;
  for (const auto& row : logits) all.insert(all.end(), row.begin(), row.end());
  const auto bits = [&](const std::vector<std::int32_t>& tokens) {
    std::vector<std::int32_t> words(static_cast<std::size_t>(n * ((vocab + 31) / 32)), 0);
    for (std::int64_t r = 0; r < n; ++r) {
      for (const std::int32_t token : tokens)
        words[static_cast<std::size_t>(r * ((vocab + 31) / 32) + token / 32)] |=
            static_cast<std::int32_t>(1u << (token % 32));
    }
    return Tensor::from(ctx, words, {n, (vocab + 31) / 32});
  };
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(n), 0);
  ops::SamplingState state{.rows = Tensor::empty(ctx, {n, sizeof(SamplingRow) / 4}, DType::i32),
                           .seen = seen.empty() ? Tensor() : bits(seen),
                           .stops = stops.empty() ? Tensor() : bits(stops),
                           .tokens = Tensor::from(ctx, zeros, {n}),
                           .positions = Tensor::from(ctx, zeros, {n}),
                           .lengths = Tensor::from(ctx, zeros, {n}),
                           .drawn = Tensor::empty(ctx, {n, 3}, DType::i32)};
  state.rows.copy_from_host(rules.data());
  ops::sample_tokens(ctx, Tensor::from(ctx, all, {n, vocab}), state);
  std::vector<DrawnToken> drawn(static_cast<std::size_t>(n));
  state.drawn.copy_to_host(drawn.data());
  EXPECT_EQ(state.positions.to_vector<std::int32_t>(),
            std::vector<std::int32_t>(static_cast<std::size_t>(n), 1));
  EXPECT_EQ(state.lengths.to_vector<std::int32_t>(),
            std::vector<std::int32_t>(static_cast<std::size_t>(n), 1));
  std::vector<std::int32_t> tokens;
  for (const DrawnToken& each : drawn) tokens.push_back(each.token);
  EXPECT_EQ(state.tokens.to_vector<std::int32_t>(), tokens);
  return drawn;
}

std::vector<float> random_logits(std::size_t count, unsigned seed, bool with_ties) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> logits(count);
  for (float& x : logits) {
    x = normal(random);
    if (with_ties) x = std::round(x);  // and zeros of both signs
  }
  return logits;
}

/// Every filter alone and with others; of rounded logits many are equal.
TEST_F(DeviceDecoder, DrawsWhatTheHostDraws) {
  const std::vector<GenerationOptions> cases = {{.temperature = 0.0},
                                                {},
                                                {.temperature = 0.7},
                                                {.top_k = 5},
                                                {.temperature = 1.5, .top_k = 40},
                                                {.top_k = 100000},
                                                {.top_p = 0.9},
                                                {.temperature = 0.5, .top_p = 0.3},
                                                {.top_p = 1.0},
                                                {.top_p = 1e-9},
                                                {.temperature = 2.0, .top_k = 50, .top_p = 0.8},
                                                {.temperature = 1e-300}};
  for (const std::size_t vocab : {std::size_t{1}, std::size_t{31}, std::size_t{257}, std::size_t{1500}}) {
    for (std::size_t c = 0; c < cases.size(); ++c) {
      std::vector<std::vector<float>> logits;
      std::vector<SamplingRow> rules;
      std::vector<std::int32_t> expected;
      for (unsigned r = 0; r < 6; ++r) {
        const GenerationOptions& o = cases[c];
        logits.push_back(random_logits(vocab, 100 * r + static_cast<unsigned>(vocab), r % 2 == 1));
        const bool greedy = o.temperature == 0.0;
        rules.push_back({.seed = 11,
                         .sample = r,
                         .position = static_cast<std::int64_t>(c),
                         .top_k = greedy ? 1 : o.top_k,
                         .temperature = greedy ? 1.0 : o.temperature,
                         .top_p = o.top_p,
                         .logprob = 1});
        expected.push_back(sample_token(logits.back(), o, uniform_at(11, r, static_cast<std::int64_t>(c))));
      }
      const std::vector<DrawnToken> drawn = drawn_by_device(logits, rules);
      for (std::size_t r = 0; r < drawn.size(); ++r) {
        EXPECT_EQ(drawn[r].failure, DrawnToken::none);
        EXPECT_EQ(drawn[r].token, expected[r]) << "case " << c << ", " << vocab << " tokens, row " << r;
        double sum = 0;
        for (const float x : logits[r]) sum += std::exp(static_cast<double>(x));
        EXPECT_NEAR(drawn[r].logprob,
                    static_cast<double>(logits[r][static_cast<std::size_t>(expected[r])]) - std::log(sum),
                    1e-5);
      }
    }
  }
}

TEST_F(DeviceDecoder, SaysWhatCannotBeDrawn) {
  const float none = -std::numeric_limits<float>::infinity();
  std::vector<std::vector<float>> logits(4, std::vector<float>(100, 1.0f));
  logits[0][99] = std::nanf("");
  logits[1][0] = -none;
  logits[2].assign(100, none);
  logits[3][7] = none;
  const auto drawn = drawn_by_device(logits, std::vector<SamplingRow>(4));
  EXPECT_EQ(drawn[0].failure, DrawnToken::not_finite);
  EXPECT_EQ(drawn[1].failure, DrawnToken::not_finite);
  EXPECT_EQ(drawn[2].failure, DrawnToken::no_token_left);
  EXPECT_EQ(drawn[3].failure, DrawnToken::none);
}

TEST_F(DeviceDecoder, PenalisesAndGoesOn) {
  // Token 3 is the likeliest, was seen, and 5 is a stop token.
  std::vector<float> logits(40, -1.0f);
  logits[3] = 4.0f, logits[5] = 3.5f, logits[6] = 3.0f, logits[33] = 1.0f;
  const auto greedy = [&](SamplingRow row) {
    row.top_k = 1;
    return drawn_by_device({logits}, {row}, {3, 33}, {5})[0].token;
  };
  EXPECT_EQ(greedy({}), 3);
  EXPECT_EQ(greedy({.repetition_penalty = 2.0f}), 5);
  EXPECT_EQ(greedy({.min_new_tokens = 1, .repetition_penalty = 2.0f}), 6);
  EXPECT_EQ(greedy({.new_tokens = 1, .min_new_tokens = 1, .repetition_penalty = 2.0f}), 5);
}

using Prompts = std::vector<std::vector<std::int32_t>>;
const Prompts kPrompts = {{5, 200, 5}, {7}, {1, 2, 3, 4, 5, 6, 7}, {90, 91}};

Config config_for(Config config, DeviceChoice device, AutoSwitch graphs) {
  config.model.max_positions = 300;
  config.device.type = device;
  config.device.cuda_graph = graphs;
  return config;
}

struct Written {
  std::vector<Generated> texts;
  StreamGraph::Stats graph;
};

Written write(const Config& config, const GenerationOptions& options) {
  const auto engine = build_engine(config, false);
  Generator generator(*engine);
  Written written{generator.run(kPrompts, options), {}};
  written.graph = generator.graph();
  return written;
}

void expect_same(const std::vector<Generated>& a, const std::vector<Generated>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    for (std::size_t j = 0; j < a[i].size(); ++j) {
      EXPECT_EQ(a[i][j].tokens, b[i][j].tokens) << "prompt " << i << ", sample " << j;
      EXPECT_EQ(a[i][j].stopped, b[i][j].stopped);
      ASSERT_EQ(a[i][j].logprobs.size(), b[i][j].logprobs.size());
      for (std::size_t t = 0; t < a[i][j].logprobs.size(); ++t)
        EXPECT_NEAR(a[i][j].logprobs[t], b[i][j].logprobs[t], 1e-4);
    }
  }
}

std::vector<GenerationOptions> ways() {
  return {{.max_new_tokens = 9, .temperature = 0.0},
          {.max_new_tokens = 9, .temperature = 0.8, .top_k = 20, .top_p = 0.9, .seed = 3, .logprobs = true},
          {.max_new_tokens = 9,
           .min_new_tokens = 4,
           .top_p = 0.95,
           .top_p_decay = 0.9,
           .top_p_bound = 0.5,
           .repetition_penalty = 1.3,
           .seed = 4,
           .num_samples = 2,
           .stop_tokens = {5, 17, 100, 200, 240},
           .batch_size = 3}};
}

TEST_F(DeviceDecoder, WritesTheCpusTexts) {
  Config windowed = tiny_llama();
  windowed.model.sliding_window = 4;
  for (const Config& model : {tiny_config(), tiny_llama(), windowed}) {
    for (const GenerationOptions& options : ways()) {
      const Written cpu = write(config_for(model, DeviceChoice::cpu, AutoSwitch::off), options);
      EXPECT_EQ(cpu.graph.plain + cpu.graph.launched, 0u);
      const Written plain = write(config_for(model, DeviceChoice::cuda, AutoSwitch::off), options);
      EXPECT_EQ(plain.graph.plain + plain.graph.launched, 0u);
      const Written graph = write(config_for(model, DeviceChoice::cuda, AutoSwitch::on), options);
      EXPECT_GT(graph.graph.launched, 0u);
      expect_same(cpu.texts, plain.texts);
      expect_same(plain.texts, graph.texts);
    }
  }
}

/// The first pass of texts runs piece by piece, the second is recorded, and all others
/// launch it again, until there are more than 256 keys.
TEST_F(DeviceDecoder, APassIsOneGraph) {
  for (const Precision precision : {Precision::fp32, Precision::bf16}) {
    Config config = config_for(tiny_llama(), DeviceChoice::cuda, AutoSwitch::on);
    config.training.precision = precision;
    const auto engine = build_engine(config, false);
    Generator generator(*engine);
    std::vector<std::uint64_t> slow;
    const Prompts prompts(3, {3, 4, 5});
    const GenerationOptions options{
        .max_new_tokens = 60, .top_k = 10, .on_token = [&](std::int64_t prompt, std::int64_t, std::int32_t) {
#if __has_include("emulator.hpp")
          if (prompt == 0) slow.push_back(tessera_emulator::slow_calls());
#else
                                      (void)prompt;
#endif
        }};
    generator.run(prompts, options);
    const StreamGraph::Stats stats = generator.graph();
    EXPECT_LE(stats.plain, 2u);  // a pass for each size of the cache, which grows once
    EXPECT_GE(stats.plain + stats.launched, 59u);
    EXPECT_LE(stats.plain + stats.launched, 60u);  // one was launched ahead of that
    EXPECT_GE(stats.replayed + 2, stats.launched);
    // The host waits once for a token, and asks for no memory.
    if (!slow.empty()) {
      EXPECT_EQ(slow[40] - slow[20], 20u);
    }
  }
}

/// Samples that share a prompt's pages, its last one half full; then each goes on in pages of its own.
TEST_F(DeviceDecoder, SamplesShareThePagesOfAPrompt) {
  Prompts prompts(2);
  for (std::int32_t i = 0; i < 125; ++i) prompts[0].push_back(i * 7 % 250);
  for (std::int32_t i = 0; i < 64; ++i) prompts[1].push_back(i * 11 % 250);
  const GenerationOptions options{.max_new_tokens = 7, .seed = 6, .num_samples = 2, .batch_size = 3};
  const auto texts = [&](DeviceChoice device, AutoSwitch graphs) {
    const auto engine = build_engine(config_for(tiny_llama(), device, graphs), false);
    return Generator(*engine).run(prompts, options);
  };
  const auto expected = texts(DeviceChoice::cpu, AutoSwitch::off);
  expect_same(texts(DeviceChoice::cuda, AutoSwitch::off), expected);
  expect_same(texts(DeviceChoice::cuda, AutoSwitch::on), expected);
}

TEST_F(DeviceDecoder, FailuresAreToldAndTheNextCallWorks) {
  const auto engine =
      build_engine(config_for(tiny_llama(), DeviceChoice::cuda, AutoSwitch::automatic), false);
  Generator generator(*engine);
  GenerationOptions options{.max_new_tokens = 20, .temperature = 0.0};
  const auto expected = generator.run(kPrompts, options);
  int asked = 0;
  options.stop = [&](std::span<const std::int32_t>) -> bool {
    if (++asked == 18) throw std::runtime_error("enough");
    return false;
  };
  expect_error<Error>([&] { generator.run(kPrompts, options); }, "enough");
  options.stop = {};
  expect_same(generator.run(kPrompts, options), expected);
}

#if __has_include("emulator.hpp")
/// Where a pass cannot be recorded it is launched piece by piece, or the error is told.
TEST_F(DeviceDecoder, WithoutARecordingItGoesOnPlainly) {
  const GenerationOptions options = ways()[1];
  const Written expected = write(config_for(tiny_llama(), DeviceChoice::cuda, AutoSwitch::off), options);
  tessera_emulator::plant_graph_mistake(0, tessera_emulator::GraphMistake::refused);
  const Written plain = write(config_for(tiny_llama(), DeviceChoice::cuda, AutoSwitch::automatic), options);
  expect_same(plain.texts, expected.texts);
  EXPECT_EQ(plain.graph.launched, 0u);
  EXPECT_THROW(write(config_for(tiny_llama(), DeviceChoice::cuda, AutoSwitch::on), options), Error);
  tessera_emulator::plant_graph_mistake(0, tessera_emulator::GraphMistake::none);
}
#endif

}  // namespace
}  // namespace tessera::test
