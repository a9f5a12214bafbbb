/// Attention of samples whose positions several ranks share, against that of one rank: results, gradients,
/// bytes.

#include <gtest/gtest.h>

#include "tessera/ops/elementwise.hpp"
#include "tessera/parallel/context.hpp"
#include "tests/support/device.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/ranks.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kLength = 24, kBatch = 2, kHeads = 4, kKvHeads = 2, kDim = 8;
constexpr std::int64_t kWidth = (kHeads + 2 * kKvHeads) * kDim;

/// The positions that a rank holds of [length, ...].
Tensor own_rows(const ExecCtx& ctx, const SequencePart& part, const Tensor& whole) {
  Shape shape = whole.shape();
  shape[0] = part.held();
  const Tensor own = Tensor::empty(ctx, shape, whole.dtype());
  for (const auto& run : part.runs())
    ops::copy(ctx, whole.narrow(0, run.whole, run.count), own.narrow(0, run.held, run.count));
  return own;
}

Tensor random(const ExecCtx& ctx, const Shape& shape, std::uint64_t seed) {
  const Tensor x = Tensor::empty(ctx, {shape.numel(), 1}, DType::f32);
  ops::fill_normal(ctx, x, 1.0f, RngKey{seed, 0, 0}, {.global_cols = 1});
  return x.view(shape);
}

struct Case {
  const char* name;
  bool causal = true, documents = false;
  std::int64_t window = 0;
  std::vector<std::int32_t> key_end = {};
  float dropout = 0.0f;
};

const Case kCases[] = {
    {"causal"},
    {.name = "both_ways", .causal = false},
    {.name = "documents", .documents = true},
    {.name = "window", .window = 5},
    {.name = "padding", .key_end = {24, 7}},
    {.name = "dropout", .dropout = 0.3f},
    {.name = "everything", .documents = true, .window = 9, .key_end = {20, 24}, .dropout = 0.2f}};

SelfAttentionOptions options_of(const ExecCtx& ctx, const Case& c) {
  SelfAttentionOptions options{kHeads, kKvHeads, kDim, {}, nullptr, {}};
  ops::AttentionOptions& attention = options.attention;
  attention.causal = c.causal;
  attention.window = c.window;
  if (!c.key_end.empty()) attention.key_end = Tensor::from(ctx, c.key_end, {kBatch});
  if (c.documents) {
    std::vector<std::int32_t> numbers;
    for (std::int64_t i = 0; i < kBatch * kLength; ++i)
      numbers.push_back(i % kLength < 5 + 10 * (i / kLength) ? 0 : 1);
    attention.document = Tensor::from(ctx, numbers, {kBatch, kLength});
  }
  attention.dropout = c.dropout;
  attention.dropout_key = {7, 8, 9};
  attention.total_heads = kHeads;
  attention.seq_length = kLength;
  return options;
}

struct Outcome {
  Tensor o, dqkv;
};

Outcome attend(const ExecCtx& ctx, const ContextParallel& context, const Case& c) {
  const SequencePart part = context.part(kLength);
  Tape tape;
  const Var qkv = tape.input(own_rows(ctx, part, random(ctx, {kLength, kBatch, kWidth}, 1)), true);
  const Var o = context_attention(ctx, context, part, qkv, options_of(ctx, c));
  const Tensor d_o = own_rows(ctx, part, random(ctx, {kLength, kBatch, kHeads * kDim}, 2));
  const Tensor value = ops::contiguous(ctx, o.value());
  tape.backward(ctx, {o}, {d_o}, Tape::WeightGradients::immediate);
  return {value, tape.take_grad(qkv)};
}

void expect_close(const Tensor& actual, const Tensor& expected) {
  const std::vector<float> a = actual.to_floats(), b = expected.to_floats();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-5) << "element " << i;
}

class ContextAttention : public ::testing::TestWithParam<Case> {};

TEST_P(ContextAttention, EqualsThatOfOneRank) {
  for (const int ranks : {2, 3}) {
    test::run_on_device(ranks, [&](std::shared_ptr<Communicator> world) {
      const ExecCtx ctx = test::context();
      const ContextParallel context{world.get()};
      const SequencePart part = context.part(kLength);
      const Outcome whole = attend(ctx, {}, GetParam());
      const std::uint64_t before = world->stats().bytes_sent;
      const Outcome own = attend(ctx, context, GetParam());
      expect_close(own.o, own_rows(ctx, part, whole.o));
      expect_close(own.dqkv, own_rows(ctx, part, whole.dqkv));
      // Keys and values to all others, twice, and their gradients.
      const auto kv = static_cast<std::uint64_t>(part.held() * kBatch * 2 * kKvHeads * kDim * 4);
      EXPECT_EQ(world->stats().bytes_sent - before, 3 * (ranks - 1) * kv);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, ContextAttention, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

TEST(SequencePart, RanksHoldAllPositionsOnceAndAsManyPairs) {
  for (const int ranks : {1, 2, 3, 5}) {
    const std::int64_t length = 60;
    std::vector<int> holders(static_cast<std::size_t>(length));
    std::int64_t first_pairs = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const SequencePart part{length, ranks, rank};
      std::int64_t held = 0, pairs = 0;
      for (const auto& run : part.runs()) {
        EXPECT_EQ(run.held, held);
        held += run.count;
        for (std::int64_t i = run.whole; i < run.whole + run.count; ++i) {
          ++holders[static_cast<std::size_t>(i)];
          pairs += i + 1;
        }
      }
      EXPECT_EQ(held, part.held());
      if (rank == 0) first_pairs = pairs;
      EXPECT_EQ(pairs, first_pairs);
    }
    for (const int count : holders) EXPECT_EQ(count, 1);
  }
}

TEST(SequencePart, LengthsThatChunksDoNotDivideAreRefused) {
  test::expect_error<InvalidArgument>([] { (SequencePart{14, 2, 0}).runs(); }, "must be a multiple of 4");
}

}  // namespace
}  // namespace tessera
