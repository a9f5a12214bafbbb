/// What Functions keep until their backward, by formula: the table in docs/floors/autograd.md. And that what
/// is computed again is really gone meanwhile.

#include "tests/support/memory.hpp"

#include "tessera/autograd/recompute.hpp"
#include "tests/autograd/block.hpp"

namespace tessera {
namespace {

using test::Block;
using test::BlockSizes;
using test::held_bytes;
using test::make_weight;
using test::random_tensor;
using test::Stream;

// 64 rows: every tensor here is a multiple of the allocator's 256 bytes, so that sums are exact.
constexpr std::int64_t kSeq = 16, kBatch = 4, kRows = kSeq * kBatch, kWidth = 64, kOut = 96, kVocab = 160;

class Kept : public ::testing::TestWithParam<DType> {
 protected:
  DType dtype = GetParam();
  std::int64_t e = static_cast<std::int64_t>(size_of(dtype));
  ExecCtx ctx = ExecCtx::cpu(1, 3);

  Tensor values(const Shape& shape, DType as) const {
    return ops::cast(ctx, random_tensor(ctx, shape, 1), as);
  }
  Var input(Tape& tape, std::int64_t width) const {
    return tape.input(values({kSeq, kBatch, width}, dtype), true);
  }
  Tensor rows_of_ints() const { return Tensor::from(ctx, std::vector<std::int32_t>(kRows, 3), {kRows}); }

  /// Bytes per row that `record` leaves behind once every Var it made is gone: what the tape keeps.
  std::int64_t per_row(const std::function<void(Tape&)>& record) const {
    Tape tape;
    const std::size_t held = held_bytes(ctx, [&] {
      record(tape);
      return 0;
    });
    EXPECT_EQ(held % kRows, 0u);
    return static_cast<std::int64_t>(held) / kRows;
  }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, Kept, ::testing::Values(DType::f32, DType::bf16, DType::f16));

TEST_P(Kept, ByLinears) {
  const auto weight = make_weight(ctx, "weight", {kOut, kWidth}, 1, dtype);
  const auto half = make_weight(ctx, "half", {kOut, kWidth / 2}, 1, dtype);
  const auto gelu = ops::ActivationKind::gelu_tanh;
  EXPECT_EQ(per_row([&](Tape& t) { linear(ctx, input(t, kWidth), *weight, nullptr); }), e * kWidth);
  EXPECT_EQ(per_row([&](Tape& t) { activated_linear(ctx, input(t, kWidth), gelu, *weight, nullptr); }),
            e * kWidth);
  EXPECT_EQ(per_row([&](Tape& t) {
              activated_linear(ctx, input(t, kWidth), ops::ActivationKind::swiglu, *half, nullptr);
            }),
            e * kWidth);
  // Of an MLP its input and what is activated.
  const auto down = make_weight(ctx, "down", {kWidth, kOut}, 1, dtype);
  EXPECT_EQ(per_row([&](Tape& t) {
              const LinearActivation h =
                  linear_with_activation(ctx, input(t, kWidth), *weight, nullptr, gelu);
              activated_linear(ctx, h.pre, gelu, *down, nullptr, h.y);
            }),
            e * (kWidth + kOut));
  weight->bind(weight->value(), Tensor());  // frozen: its input is not needed
  EXPECT_EQ(per_row([&](Tape& t) { linear(ctx, input(t, kWidth), *weight, nullptr); }), 0);
}

TEST_P(Kept, ByNorms) {
  const auto weight = make_weight(ctx, "weight", {kWidth}, 1, DType::f32);
  const auto bias = make_weight(ctx, "bias", {kWidth}, 2, DType::f32);
  const auto linear_weight = make_weight(ctx, "linear", {kOut, kWidth}, 3, dtype);
  for (const DType residual : {DType::f32, dtype}) {
    const auto r = static_cast<std::int64_t>(size_of(residual));
    for (const bool rms : {false, true}) {
      for (const bool branch : {false, true}) {
        const auto norm = [&](Tape& t, bool forget) {
          const Var x = t.input(values({kSeq, kBatch, kWidth}, residual), true);
          return add_norm(ctx, x, branch ? input(t, kWidth) : Var(), *weight, rms ? nullptr : bias.get(),
                          {.rms = rms, .eps = 1e-5f, .out = dtype}, {}, forget);
        };
        const std::int64_t alone = r * kWidth + (rms ? 4 : 8);
        for (const bool forget : {false, true}) {
          EXPECT_EQ(per_row([&](Tape& t) { norm(t, forget); }), alone);
          // What follows keeps y, or its recipe, which holds what the norm keeps anyway.
          EXPECT_EQ(per_row([&](Tape& t) { linear(ctx, norm(t, forget).y, *linear_weight, nullptr); }),
                    alone + (forget ? 0 : e * kWidth));
          EXPECT_EQ(per_row([&](Tape& t) {
                      activated_linear(ctx, norm(t, forget).y, ops::ActivationKind::silu, *linear_weight,
                                       nullptr);
                    }),
                    alone + (forget ? 0 : e * kWidth));
        }
      }
    }
  }
}

TEST_P(Kept, ByAttention) {
  SelfAttentionOptions o;
  o.heads = 4;
  o.kv_heads = 2;
  o.head_dim = 16;
  const auto proj = make_weight(ctx, "proj", {kWidth, 64}, 3, dtype);
  const std::int64_t alone = e * (4 + 2 * 2) * 16 + e * 4 * 16 + 4 * 4;
  EXPECT_EQ(per_row([&](Tape& t) { self_attention(ctx, input(t, 128), o); }), alone);
  // The linear behind it keeps the same result.
  EXPECT_EQ(per_row([&](Tape& t) { linear(ctx, self_attention(ctx, input(t, 128), o), *proj, nullptr); }),
            alone);
}

TEST_P(Kept, ByEmbeddingsAndLosses) {
  const auto table = make_weight(ctx, "table", {kVocab, kWidth}, 1, DType::f32);
  const auto places = make_weight(ctx, "places", {8, kWidth}, 2, DType::f32);
  const auto head = make_weight(ctx, "head", {kVocab, kWidth}, 3, dtype);
  EXPECT_EQ(per_row([&](Tape& t) {
              embedding(ctx, t.input(rows_of_ints(), false), *table, rows_of_ints(), places.get(), {dtype});
            }),
            4 + 4);
  EXPECT_EQ(per_row([&](Tape& t) {
              cross_entropy(ctx, t.input(values({kRows, kVocab}, dtype), true), rows_of_ints());
            }),
            e * kVocab + 4 + 4);
  EXPECT_EQ(per_row([&](Tape& t) {
              linear_cross_entropy(ctx, input(t, kWidth), *head, rows_of_ints(),
                                   random_tensor(ctx, {kRows}, 9));
            }),
            e * kWidth + 4);
}

TEST_P(Kept, ByElementwiseOperations) {
  const DropoutSpec drop{
      .key = {7, site_of("test"), 2}, .probability = 0.4f, .batch = kBatch, .seq_length = kSeq};
  EXPECT_EQ(per_row([&](Tape& t) { activation(ctx, input(t, kWidth), ops::ActivationKind::silu); }),
            e * kWidth);
  EXPECT_EQ(per_row([&](Tape& t) { swiglu(ctx, input(t, kWidth)); }), e * kWidth);
  EXPECT_EQ(per_row([&](Tape& t) { add(ctx, input(t, kWidth), input(t, kWidth)); }), 0);
  EXPECT_EQ(per_row([&](Tape& t) { dropout(ctx, input(t, kWidth), drop); }), 0);
}

TEST_P(Kept, ByRecomputedParts) {
  const auto weight = make_weight(ctx, "weight", {kOut, kWidth}, 1, dtype);
  const auto part = [&](const std::vector<Var>& in) {
    return std::vector<Var>{linear(ctx, activation(ctx, in[0], ops::ActivationKind::silu), *weight, nullptr)};
  };
  EXPECT_EQ(per_row([&](Tape& t) { recompute(ctx, {input(t, kWidth)}, {weight.get()}, part); }), e * kWidth);
}

/// A block: the sum of its Functions. fc1's result is kept once, by activated_linear.
TEST_P(Kept, ByAWholeBlock) {
  BlockSizes sizes{
      .seq = kSeq, .batch = kBatch, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 256, .compute = dtype};
  for (const DType residual : {DType::f32, dtype}) {
    const auto r = static_cast<std::int64_t>(size_of(residual));
    for (const bool forget : {false, true}) {
      sizes.forget = forget;
      const Block block(ctx, "block", sizes, 1);
      const std::int64_t got = per_row([&](Tape& t) {
        block.forward(ctx, {t.input(values(sizes.stream(), residual), true),
                            t.input(values(sizes.stream(), dtype), true)});
      });
      const std::int64_t norms = 2 * (r * kWidth + 8), attention = e * 128 + e * 64 + 4 * 4, mlp = e * 256;
      EXPECT_EQ(got, norms + (forget ? 0 : 2 * e * kWidth) + attention + mlp);
    }
  }
}

/// Highest use over forward and backward of `count` norms with a linear behind each.
std::size_t peak_of_norms(const ExecCtx& ctx, DType dtype, int count, bool forget,
                          Tape::WeightGradients weights) {
  const auto norm = make_weight(ctx, "norm", {kWidth}, 1, DType::f32);
  const auto weight = make_weight(ctx, "weight", {kWidth, kWidth}, 2, dtype);
  const Tensor x = random_tensor(ctx, {kSeq, kBatch, kWidth}, 3);
  const Tensor upstream = ops::cast(ctx, x, dtype);
  return test::peak_bytes(ctx, [&] {
    Tape tape;
    Var residual = tape.input(x, true), branch;
    for (int i = 0; i < count; ++i) {
      ResidualNorm n = add_norm(ctx, residual, branch, *norm, nullptr,
                                {.rms = true, .eps = 1e-5f, .out = dtype}, {}, forget);
      residual = std::move(n.residual);
      branch = linear(ctx, n.y, *weight, nullptr);
    }
    residual = Var();
    tape.backward(ctx, branch, upstream, weights);
    tape.run_weight_gradients(ctx);
  });
}

TEST_P(Kept, ForgottenNormsLowerThePeak) {
  const std::size_t y = static_cast<std::size_t>(kRows * kWidth * e);
  for (const auto weights : {Tape::WeightGradients::immediate, Tape::WeightGradients::deferred}) {
    for (const int count : {2, 7, 40}) {
      const auto kept = static_cast<double>(peak_of_norms(ctx, dtype, count, false, weights));
      const auto forgotten = static_cast<double>(peak_of_norms(ctx, dtype, count, true, weights));
      // One of them exists at a time.
      const double expected = static_cast<double>(count - 1) * static_cast<double>(y);
      EXPECT_NEAR(kept - forgotten, expected, 0.02 * expected) << count << " norms";
    }
  }
}

TEST_P(Kept, RecomputedBlocksLowerThePeak) {
  const BlockSizes sizes{
      .seq = kSeq, .batch = kBatch, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 256, .compute = dtype};
  constexpr int kBlocks = 6;
  std::vector<std::unique_ptr<Block>> blocks;
  for (int i = 0; i < kBlocks; ++i)
    blocks.push_back(std::make_unique<Block>(ctx, std::to_string(i) + ".block", sizes, 1));
  const Tensor x = random_tensor(ctx, sizes.stream(), 3);
  const auto peak = [&](bool again) {
    return test::peak_bytes(ctx, [&] {
      Tape tape;
      Stream stream{tape.input(x, true), {}};
      for (const auto& block : blocks) {
        const auto part = [&](const std::vector<Var>& in) {
          const Stream out = block->forward(ctx, {in[0], in[1]});
          return std::vector<Var>{out.residual, out.branch};
        };
        const std::vector<Var> in{stream.residual, stream.branch};
        std::vector<Var> out = again ? recompute(ctx, in, block->parameters(), part) : part(in);
        stream = {std::move(out[0]), std::move(out[1])};
      }
      const std::vector<Var> roots{stream.residual, stream.branch};
      stream = {};
      tape.backward(ctx, roots, {random_tensor(ctx, sizes.stream(), 4), ops::cast(ctx, x, dtype)});
    });
  };
  // Both peaks are at the beginning of the backward pass. Kept: all blocks with everything; recomputed: the
  // last one with everything, those before it with their inputs (residual and branch). The first block's
  // residual is x in either case; it has no branch.
  const std::int64_t norms = 2 * (4 * kWidth + 8), linears = 2 * e * kWidth + e * 256,
                     attention = e * 128 + e * 64 + 4 * 4, everything = norms + linears + attention;
  const std::int64_t kept = kBlocks * everything - 4 * kWidth;
  const std::int64_t recomputed = everything + (kBlocks - 2) * (4 + e) * kWidth;
  const std::int64_t saved = kept - recomputed;
  const auto difference = static_cast<double>(peak(false)) - static_cast<double>(peak(true));
  EXPECT_NEAR(difference, static_cast<double>(saved * kRows), 0.02 * static_cast<double>(saved * kRows));
}

}  // namespace
}  // namespace tessera
