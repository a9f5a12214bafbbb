/// Ops refuse what does not fit, and the message holds the values; views with gaps are read rightly.

#include "tests/support/gradcheck.hpp"

#include "tessera/ops/activation.hpp"
#include "tessera/ops/attention.hpp"
#include "tessera/ops/cross_entropy.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/embedding.hpp"
#include "tessera/ops/gemm.hpp"
#include "tessera/ops/norm.hpp"
#include "tessera/ops/optimizer.hpp"
#include "tessera/ops/reduce.hpp"
#include "tessera/ops/rope.hpp"
#include "tests/ops/fused_linear.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::distance;
using test::random_tensor;

struct Ops : ::testing::Test {
  Tensor f32(const Shape& shape, unsigned seed = 1) const { return random_tensor(ctx, shape, seed); }
  Tensor bf16(const Shape& shape, unsigned seed = 1) const {
    return ops::cast(ctx, f32(shape, seed), DType::bf16);
  }
  Tensor ints(std::vector<std::int32_t> values) const {
    const auto count = static_cast<std::int64_t>(values.size());
    return Tensor::from(ctx, values, {count});
  }

  template <typename Fn, typename... Parts>
  void refused(Fn&& fn, const Parts&... parts) const {
    SCOPED_TRACE(::testing::PrintToString(std::vector<std::string>{parts...}));
    try {
      fn();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const InvalidArgument& error) {
      for (const std::string& part : {std::string(parts)...})
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
            << "'" << part << "' is not in: " << error.what();
    }
  }
  ExecCtx ctx = test::context(2, 3);
};

TEST_F(Ops, GemmRefuses) {
  refused([&] { ops::matmul(ctx, f32({3, 5}), f32({4, 7})); }, "4", "5");
  refused([&] { ops::matmul(ctx, f32({3, 5}), bf16({5, 7})); }, "float32", "bfloat16");
  refused(
      [&] {
        ops::matmul_into(ctx, f32({3, 5}), f32({5, 7}), f32({3, 6}), 0.0f, false, false);
      },
      "[3, 7]", "[3, 6]");
  refused([&] { ops::linear(ctx, f32({2, 5}), f32({7, 4}), {}); }, "4", "5");
  refused([&] { ops::linear(ctx, f32({2, 5}), f32({7, 5}), f32({6})); }, "[6]", "7 outputs");
  refused([&] { ops::linear(ctx, f32({2, 5}), f32({7, 5}), bf16({7})); }, "bfloat16");
  for (const ops::ActivationKind kind : {ops::ActivationKind::gelu_tanh, ops::ActivationKind::relu}) {
    refused([&] { test::linear_with_activation(ctx, f32({2, 5}), f32({7, 4}), {}, kind); }, "4", "5");
    refused([&] { test::linear_with_activation(ctx, f32({2, 5}), f32({7, 5}), f32({6}), kind); }, "[6]");
    const auto gradient = [&](const Tensor& pre) {
      test::linear_backward_input(ctx, f32({2, 7}), f32({7, 5}), pre, kind);
    };
    refused([&] { gradient(f32({5, 2})); }, "[5, 2]", "[2, 5]");
    refused([&] { gradient(bf16({2, 5})); }, "float32", "bfloat16");
    refused([&] { gradient(f32({5, 2}).transpose(0, 1)); }, "contiguous");
  }
  refused(
      [&] {
        ops::linear_backward_weight(ctx, bf16({3, 7}), bf16({3, 5}), bf16({7, 5}), 0.0f);
      },
      "float32", "bfloat16");
  const auto with_bias = [&](const Tensor& dbias) {
    ops::linear_backward_weight(ctx, f32({3, 7}), f32({3, 5}), f32({7, 5}), 0.0f, dbias, 0.0f);
  };
  refused([&] { with_bias(f32({6})); }, "6", "7");
  refused([&] { with_bias(bf16({7})); }, "float32", "bfloat16");
  refused([&] { ops::matmul(ctx, f32({3, 5}).transpose(0, 1), f32({3, 7})); }, "contiguous");
  refused([&] { ops::matmul(ctx, ints({1, 2}).view({1, 2}), ints({1, 2}).view({2, 1})); }, "int32");
}

TEST_F(Ops, ElementwiseRefuses) {
  refused([&] { ops::add(ctx, f32({3, 5}), f32({5, 3}), DType::f32); }, "[3, 5]", "[5, 3]");
  refused([&] { ops::add(ctx, f32({3, 5}).transpose(0, 1), f32({5, 3}), DType::f32); }, "contiguous");
  refused([&] { ops::axpby(ctx, 1.0f, f32({3}), 0.0f, f32({4})); }, "3", "4");
  refused([&] { ops::copy(ctx, f32({3}), bf16({3})); }, "float32", "bfloat16");
  refused([&] { ops::copy(ctx, f32({3}), f32({4})); }, "[3]", "[4]");
  refused([&] { ops::contiguous(ctx, f32({1, 1, 1, 1, 2})); }, "rank");
  refused([&] { ops::cast(ctx, ints({1}), DType::f32); }, "int32");
  refused([&] { ops::fill_constant(ctx, bf16({3}), 1.0f); }, "bfloat16");
  refused(
      [&] {
        ops::activation_backward(ctx, f32({3, 4}), f32({4, 3}), ops::ActivationKind::relu);
      },
      "[3, 4]", "[4, 3]");
  refused([&] { ops::swiglu(ctx, f32({3, 5})); }, "5");
  refused([&] { ops::swiglu_backward(ctx, f32({3, 6}), f32({3, 4})); }, "[3, 6]", "[3, 4]");
  refused([&] { ops::column_sum(ctx, f32({3, 5}), f32({4}), 0.0f); }, "4", "5");
}

TEST_F(Ops, EmbeddingNormAndLossRefuse) {
  refused([&] { ops::embedding(ctx, ints({0}), f32({7}), {}, {}, {}); }, "[7]");
  refused([&] { ops::embedding(ctx, ints({0}), f32({7, 5}), ints({0}), {}, {}); }, "position");
  refused(
      [&] {
        ops::embedding(ctx, ints({0}), f32({7, 5}), ints({0}), f32({3, 4}), {});
      },
      "[3, 4]", "[7, 5]");
  refused(
      [&] {
        ops::embedding_backward(ctx, ints({0, 1}), f32({1, 5}), f32({7, 5}), 0.0f);
      },
      "[1, 5]", "[7, 5]");
  refused([&] { ops::add_norm(ctx, f32({3, 5}), {}, f32({4}), {}, {}); }, "[4]", "5");
  refused([&] { ops::add_norm(ctx, f32({3, 5}), f32({3, 4}), f32({5}), {}, {}); }, "[3, 5]", "[3, 4]");
  refused([&] { ops::add_norm(ctx, f32({3, 5}), bf16({3, 5}), f32({5}), {}, {}); }, "float32", "bfloat16");
  refused([&] { ops::cross_entropy(ctx, f32({3, 5}), ints({1, 2})); }, "2", "3");
  refused([&] { ops::cross_entropy(ctx, f32({3, 5}), f32({3})); }, "float32", "int32");
  refused([&] { ops::cross_entropy_part(ctx, f32({3, 5}), ints({1, 2}), 5); }, "2", "3");
  refused([&] { ops::combine_cross_entropy_into(ctx, f32({2, 2, 3}), ints({1, 2}), f32({2})); }, "[2, 2, 3]");
  refused([&] { ops::combine_cross_entropy_into(ctx, f32({2, 2, 2}), ints({1, 2}), f32({3})); }, "[3]");
}

TEST_F(Ops, AttentionAndRopeRefuse) {
  const Tensor q = f32({4, 2, 6, 3});
  const auto attend = [&](const Tensor& k, const Tensor& v, const ops::AttentionOptions& o = {}) {
    return [&, k, v, o] { ops::attention(ctx, q, k, v, o); };
  };
  refused(attend(f32({4, 2, 4, 3}), f32({4, 2, 4, 3})), "6 query heads", "4 KV heads");
  refused(attend(f32({4, 2, 6, 3}), f32({5, 2, 6, 3})), "[4, 2, 6, 3]", "[5, 2, 6, 3]");
  refused(attend(f32({4, 3, 6, 3}), f32({4, 3, 6, 3})), "[4, 3, 6, 3]");
  refused(attend(bf16({4, 2, 6, 3}), bf16({4, 2, 6, 3})), "dtype");
  refused(attend(f32({4, 2, 6}), f32({4, 2, 6})), "[4, 2, 6]");
  ops::AttentionOptions o;
  o.alibi_slopes = f32({5});
  refused(attend(q, q, o), "slope");
  o = {};
  o.key_begin = ints({0, 0, 0});
  refused(attend(q, q, o), "key_begin", "[2]", "[3]");
  o = {};
  o.document = ints({0, 0});
  refused(attend(q, q, o), "document", "[2, 4]");
  refused([&] { ops::make_rope_table(ctx, 8, 5, {.theta = 100.0}); }, "5");
  refused([&] { ops::make_rope_table(ctx, 8, 0, {.theta = 100.0}); }, "0");
  const ops::RopeTable table = ops::make_rope_table(ctx, 8, 4, {.theta = 100.0});
  refused([&] { ops::rope_in_place(ctx, q, ints({0, 0, 0, 0, 0, 0, 0, 0}), table, false); }, "4", "3");
  refused([&] { ops::rope_in_place(ctx, f32({4, 2, 6, 4}), ints({0, 0}), table, false); }, "2", "8");
}

TEST_F(Ops, GradientsNeedTheDtypeOfTheirValues) {
  using ops::ActivationKind;
  refused(
      [&] {
        ops::activation_backward(ctx, f32({3, 4}), bf16({3, 4}), ActivationKind::relu);
      },
      "bfloat16", "float32");
  refused([&] { ops::swiglu_backward(ctx, f32({3, 4}), bf16({3, 2})); }, "bfloat16", "float32");
  const auto saved = ops::add_norm(ctx, f32({3, 5}), {}, f32({5}), {}, {});
  refused(
      [&] {
        ops::add_norm_backward(ctx, saved, f32({5}), bf16({3, 5}), {}, false, {});
      },
      "bfloat16", "float32");
  refused(
      [&] {
        ops::add_norm_backward(ctx, saved, f32({5}), f32({3, 5}), bf16({3, 5}), false, {});
      },
      "bfloat16");
}

TEST_F(Ops, KernelsKnowThreeDtypes) {
  const Tensor twice = Tensor::empty(ctx, {4, 4}, DType::f64), whole = ints({1, 2, 3, 4}).view({2, 2});
  const Tensor heads = Tensor::empty(ctx, {4, 2, 1, 2}, DType::f64);
  const ops::RopeTable table = ops::make_rope_table(ctx, 8, 2, {.theta = 100.0});
  for (const Tensor& t : {twice, whole}) {
    const std::string name(name_of(t.dtype()));
    refused([&] { ops::activation(ctx, t, ops::ActivationKind::relu); }, name);
    refused([&] { ops::swiglu(ctx, t); }, name);
    refused([&] { ops::add(ctx, t, t, DType::f32); }, name);
    refused([&] { ops::dropout(ctx, t, {.probability = 0.5f}); }, name);
    refused([&] { ops::cross_entropy(ctx, t, ints({0, 0, 0, 0}).narrow(0, 0, t.size(0))); }, name);
    refused([&] { ops::add_norm(ctx, t, {}, f32({t.size(1)}), {}, {}); }, name);
    refused([&] { ops::embedding(ctx, ints({0}), t, {}, {}, {}); }, name);
    refused([&] { ops::column_sum(ctx, t, f32({t.size(1)}), 0.0f); }, name);
    refused([&] { ops::linear(ctx, t, t, {}); }, name);
  }
  refused([&] { ops::attention(ctx, heads, heads, heads, {}); }, "float64");
  refused([&] { ops::rope_in_place(ctx, heads, ints({0, 0, 0, 0, 0, 0, 0, 0}), table, false); }, "float64");
  refused([&] { ops::cast(ctx, f32({3}), DType::f64); }, "float64");
  refused([&] { ops::add(ctx, f32({3}), f32({3}), DType::i32); }, "int32");
}

TEST_F(Ops, TheTwoShortDtypesMeetInCastsAlone) {
  const Tensor brain = bf16({4, 6}), half = ops::cast(ctx, brain, DType::f16);
  EXPECT_LE(distance(half.to_floats(), brain.to_floats()), 1e-6);
  const auto add = [&](const Tensor& a, const Tensor& b, DType out) {
    return [&, out] { ops::add(ctx, a, b, out); };
  };
  refused(add(brain, half, DType::f32), "bfloat16", "float16", "cast one of them");
  refused(add(brain, brain, DType::f16), "bfloat16", "float16");
  refused(add(f32({4, 6}), half, DType::bf16), "bfloat16", "float16");
  refused([&] { ops::add_norm(ctx, half, {}, f32({6}), {}, {.out = DType::bf16}); }, "bfloat16", "float16");
  refused([&] { ops::embedding(ctx, ints({0}), half, {}, {}, {DType::bf16, {}, 0}); }, "bfloat16", "float16");
}

TEST_F(Ops, OptimizersRefuse) {
  const Tensor state = ops::make_update_state(ctx, {}), factors = ops::make_group_factors(ctx, 2);
  const auto groups = [&](std::int64_t blocks) {
    return ops::ElementGroups{factors, Tensor::from(ctx, std::vector<std::uint8_t>(blocks), {blocks})};
  };
  const ops::ElementGroups one = groups(1);
  const ops::MainWeights four{f32({4}), {}};
  refused([&] { ops::adam(ctx, state, one, f32({3}), four, f32({3}), f32({3})); }, "main weights", "3", "4");
  refused([&] { ops::adam(ctx, state, groups(2), f32({4}), four, f32({4}), f32({4})); }, "blocks");
  refused(
      [&] {
        ops::sgd(ctx, state, groups(1), f32({65}), {f32({65}), {}}, {}, false);
      },
      "blocks", "2", "1");
  refused(
      [&] {
        ops::sgd(ctx, state, {state, one.of_block}, f32({4}), four, {}, false);
      },
      "make_group_factors");
  refused([&] { ops::sgd(ctx, state, one, f32({4}), four, {}, true); }, "momentum");
  refused([&] { ops::sgd(ctx, f32({4}), one, f32({4}), four, {}, false); }, "make_update_state");
  const Tensor brain = Tensor::empty(ctx, {4}, DType::bf16), low = Tensor::empty(ctx, {4}, DType::u16);
  refused([&] { ops::sgd(ctx, state, one, f32({4}), {four.main, brain, low}, {}, false); }, "not both");
  refused(
      [&] {
        ops::sgd(ctx, state, one, f32({4}), {{}, f32({4}), low}, {}, false);
      },
      "bfloat16", "float32");
  refused([&] { ops::split_main(ctx, f32({4}), brain, brain); }, "lower half", "uint16");
  refused([&] { ops::join_main(ctx, brain, low.narrow(0, 0, 3), f32({4})); }, "lower half", "4", "3");
  refused([&] { ops::make_group_factors(ctx, 256); }, "1 to 255", "256");
  const std::vector<GroupRule> rules(3);
  refused([&] { ops::update_groups(ctx, state, factors, {.num_rates = 5, .rules = rules}); }, "1 to 4");
  refused([&] { ops::update_groups(ctx, state, factors, {.rules = rules}); }, "rules", "3", "2");
  refused([&] { ops::add_sum_squares(ctx, f32({4}), f32({4}), ops::squares_of(state)); }, "make_sum_runs");
}

TEST_F(Ops, RowsMayBeApart) {
  const Tensor wide = f32({5, 13});
  const Tensor view = wide.narrow(1, 3, 7), dense = ops::contiguous(ctx, view);
  const Tensor weight = f32({11, 7}, 2);
  EXPECT_EQ(ops::linear(ctx, view, weight, {}).to_floats(), ops::linear(ctx, dense, weight, {}).to_floats());
  const Tensor a = f32({7}), b = f32({7});
  ops::column_sum(ctx, view, a, 0.0f);
  ops::column_sum(ctx, dense, b, 0.0f);
  EXPECT_EQ(a.to_floats(), b.to_floats());
  const Tensor labels = ints({0, 6, -100, 3, 2});
  const auto apart = ops::cross_entropy(ctx, view, labels).loss.to_floats();
  const auto together = ops::cross_entropy(ctx, dense, labels).loss.to_floats();
  for (std::size_t i = 0; i < apart.size(); ++i) EXPECT_NEAR(apart[i], together[i], 1e-6);
}

TEST_F(Ops, StridedCopies) {
  const Tensor x = f32({3, 4, 5});
  const std::vector<float> values = x.to_floats();
  const std::vector<float> turned = ops::contiguous(ctx, x.transpose(0, 2)).to_floats();
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 4; ++j) {
      for (std::size_t k = 0; k < 5; ++k) EXPECT_EQ(turned[(k * 4 + j) * 3 + i], values[(i * 4 + j) * 5 + k]);
    }
  }
  EXPECT_NE(ops::contiguous(ctx, x).raw(), x.raw());  // a copy even where none is needed: callers write to it
}

TEST_F(Ops, PaddedRowsBeginOnMultiples) {
  const Tensor y = ops::linear(ctx, f32({3, 2, 5}), f32({7, 5}, 2), f32({7}, 3), 32);
  EXPECT_EQ(y.shape(), (Shape{6, 7}));
  EXPECT_EQ(y.strides(), (Shape{32, 1}));
  EXPECT_LE(distance(ops::contiguous(ctx, y).to_floats(),
                     ops::linear(ctx, f32({3, 2, 5}), f32({7, 5}, 2), f32({7}, 3)).to_floats()),
            1e-6);
}

TEST_F(Ops, EmptyTensorsAreNoTrouble) {
  EXPECT_EQ(ops::linear(ctx, f32({0, 5}), f32({7, 5}), {}).shape(), (Shape{0, 7}));
  EXPECT_EQ(test::linear_with_activation(ctx, f32({0, 5}), f32({7, 5}), {}, ops::ActivationKind::gelu_erf)
                .y.shape(),
            (Shape{0, 7}));
  EXPECT_EQ(ops::activation(ctx, f32({0, 5}), ops::ActivationKind::silu).numel(), 0);
  EXPECT_EQ(ops::swiglu(ctx, f32({0, 6})).shape(), (Shape{0, 3}));
  EXPECT_EQ(ops::add(ctx, f32({0}), f32({0}), DType::f32).numel(), 0);
  EXPECT_EQ(ops::sum(ctx, f32({0})).to_vector<double>()[0], 0.0);
}

TEST_F(Ops, OnlyWhatNobodyElseHoldsIsWrittenOver) {
  const Tensor x = f32({3, 4});
  Tensor dy = f32({3, 4}, 2);
  const Tensor held = dy;
  const auto before = held.to_floats();
  const Tensor dx = ops::activation_backward(ctx, x, dy, ops::ActivationKind::silu);
  EXPECT_NE(dx.raw(), held.raw());
  EXPECT_EQ(held.to_floats(), before);
  Tensor alone = f32({3, 4}, 2);
  const void* memory = alone.raw();
  EXPECT_EQ(ops::activation_backward(ctx, x, alone, ops::ActivationKind::silu).raw(), memory);
}

}  // namespace
}  // namespace tessera
