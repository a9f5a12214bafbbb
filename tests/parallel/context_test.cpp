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

constexpr std::int64_t kLength = 24, kBatch = 2, kHeads = 12, kKvHeads = 6, kDim = 8;
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
  bool alibi = false, rope = false;
};

const Case kCases[] = {{"causal"},
                       {.name = "both_ways", .causal = false},
                       {.name = "documents", .documents = true},
                       {.name = "window", .window = 5},
                       {.name = "padding", .key_end = {24, 7}},
                       {.name = "dropout", .dropout = 0.3f},
                       {.name = "alibi", .alibi = true},
                       {.name = "rope", .rope = true},
                       {.name = "everything",
                        .documents = true,
                        .window = 9,
                        .key_end = {20, 24},
                        .dropout = 0.2f,
                        .alibi = true,
                        .rope = true}};

/// Where in their samples the positions are that a rank holds.
Tensor positions_of(const ExecCtx& ctx, const SequencePart& part) {
  std::vector<std::int32_t> positions;
  for (const auto& run : part.runs()) {
    for (std::int64_t i = 0; i < run.count * kBatch; ++i)
      positions.push_back(static_cast<std::int32_t>(run.whole + i / kBatch));
  }
  return Tensor::from(ctx, positions, {static_cast<std::int64_t>(positions.size())});
}

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
  if (c.alibi) {
    std::vector<float> slopes;
    for (std::int64_t head = 0; head < kHeads; ++head) slopes.push_back(0.1f * static_cast<float>(head + 1));
    attention.alibi_slopes = Tensor::from(ctx, slopes, {kHeads});
  }
  if (c.dropout > 0) {
    attention.dropout = c.dropout;
    attention.dropout_key = {7, 8, 9};
    attention.total_heads = kHeads;
    attention.seq_length = kLength;
  }
  return options;
}

struct Outcome {
  Tensor o, dqkv;
};

Outcome attend(const ExecCtx& ctx, const ContextParallel& context, const Case& c) {
  const SequencePart part = context.part(kLength);
  const ops::RopeTable rope = ops::make_rope_table(ctx, kLength, kDim, {.theta = 100.0});
  SelfAttentionOptions options = options_of(ctx, c);
  if (c.rope) options.rope = &rope, options.positions = positions_of(ctx, part);
  Tape tape;
  const Var qkv = tape.input(own_rows(ctx, part, random(ctx, {kLength, kBatch, kWidth}, 1)), true);
  const Var o = context_attention(ctx, context, part, qkv, options);
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

/// Bytes that a rank sends in forward and backward of attention.
std::uint64_t sent(ContextMethod method, const SequencePart& part) {
  const auto others = static_cast<std::uint64_t>(part.ranks - 1);
  const auto held = static_cast<std::uint64_t>(part.held() * kBatch * kDim * 4);
  // Keys and values to all others, twice, and their gradients; or of everything what others compute, both
  // ways.
  if (method == ContextMethod::all_gather) return 3 * others * held * 2 * kKvHeads;
  return 2 * others * held * (2 * kHeads + 2 * kKvHeads) / static_cast<std::uint64_t>(part.ranks);
}

using MethodCase = std::tuple<ContextMethod, Case>;
class ContextAttention : public ::testing::TestWithParam<MethodCase> {};

TEST_P(ContextAttention, EqualsThatOfOneRank) {
  const auto& [method, c] = GetParam();
  for (const int ranks : {2, 3}) {
    test::run_on_device(ranks, [&, method = method, &c = c](std::shared_ptr<Communicator> world) {
      const ExecCtx ctx = test::context();
      const ContextParallel context{world.get(), method};
      const SequencePart part = context.part(kLength);
      const Outcome whole = attend(ctx, {}, c);
      const std::uint64_t before = world->stats().bytes_sent;
      const Outcome own = attend(ctx, context, c);
      expect_close(own.o, own_rows(ctx, part, whole.o));
      expect_close(own.dqkv, own_rows(ctx, part, whole.dqkv));
      EXPECT_EQ(world->stats().bytes_sent - before, sent(method, part));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, ContextAttention,
                         ::testing::Combine(::testing::Values(ContextMethod::all_gather,
                                                              ContextMethod::ulysses),
                                            ::testing::ValuesIn(kCases)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::get<1>(info.param).name;
                         });

TEST(ContextMethods, AutomaticallyWhatSendsLess) {
  for (const int ranks : {2, 3, 4}) {
    test::run_ranks(ranks, {}, [&](std::shared_ptr<Communicator> world) {
      const ExecCtx ctx = ExecCtx::cpu();
      const ContextParallel context{world.get()};
      attend(ctx, context, kCases[0]);
      // 12 heads and 6 of keys and values: as much by either way among two ranks, less by heads among three;
      // four do not divide the six.
      EXPECT_EQ(world->stats().bytes_sent,
                sent(ranks == 3 ? ContextMethod::ulysses : ContextMethod::all_gather, context.part(kLength)));
    });
  }
}

TEST(ContextMethods, HeadsThatRanksDoNotDivideAreRefused) {
  test::run_ranks(4, {}, [](std::shared_ptr<Communicator> world) {
    const ContextParallel context{world.get(), ContextMethod::ulysses};
    test::expect_error<InvalidArgument>([&] { attend(ExecCtx::cpu(), context, kCases[0]); },
                                        "4 context ranks do not divide the 6 key-value heads");
  });
}

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
