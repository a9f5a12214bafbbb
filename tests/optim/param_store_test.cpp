#include "tessera/optim/param_store.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "tessera/optim/optimizer.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

/// Adds `values` to a gradient as a backward would: overwriting with the first contribution.
void contribute(Parameter& p, const std::vector<float>& values) {
  const float beta = p.next_beta();
  test::edit(p.grad(), [&](std::vector<float>& grad) {
    for (std::size_t i = 0; i < values.size(); ++i) grad[i] = (beta == 0 ? 0 : beta * grad[i]) + values[i];
  });
}

std::vector<float> gradient_of(const ParamStore& store, const Parameter& p) {
  const FlatGradient gradient = store.gradient().sum();
  auto values = store.view(gradient.flat, p).to_vector<float>();
  for (float& v : values) v = static_cast<float>(v * gradient.scale);
  return values;
}

TEST(ParamStore, LaysOutInReverseWithAlignedStarts) {
  const ExecCtx ctx = test::context(1);
  Parameter a("a", {100, 3}, Init::ones()), b("b", {1}, Init::ones()), c("c", {64}, Init::ones()),
      d("d", {5, 13}, Init::ones());
  const ParamStore store(ctx, {&a, &b, &c, &d});
  ASSERT_EQ(store.slots().size(), 4u);
  const std::vector<std::pair<const Parameter*, std::int64_t>> expected = {
      {&d, 0}, {&c, 128}, {&b, 192}, {&a, 256}};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(store.slots()[i].parameter, expected[i].first);
    EXPECT_EQ(store.slots()[i].offset, expected[i].second);
  }
  EXPECT_EQ(store.numel(), 256 + 320);
  EXPECT_EQ(store.parameters(), (std::vector<Parameter*>{&a, &b, &c, &d}));
  EXPECT_EQ(a.value().shape(), (Shape{100, 3}));
  EXPECT_EQ(a.grad().shape(), (Shape{100, 3}));
  EXPECT_EQ(a.value().raw(), store.weights().main_buffer().data<float>() + 256);
  EXPECT_EQ(a.grad().raw(), store.gradient().latest_call().on_device().data<float>() + 256);
  EXPECT_EQ(store.weights().main(a).raw(), a.value().raw());
  const auto main = store.weights().main_buffer().to_vector<float>();
  EXPECT_EQ(std::accumulate(main.begin(), main.end(), 0.0), 300 + 1 + 64 + 65);  // the gaps are zero
}

TEST(ParamStore, InitialValuesDependOnNameAndSeedAlone) {
  const auto values = [](std::vector<std::string> order, std::uint64_t seed, int threads) {
    std::vector<std::unique_ptr<Parameter>> parameters;
    std::vector<Parameter*> pointers;
    for (const auto& name : order) {
      const Shape shape = name == "bias" ? Shape{37} : name == "cube" ? Shape{3, 5, 7} : Shape{211, 29};
      parameters.push_back(std::make_unique<Parameter>(name, shape, Init::normal(0.02f)));
      pointers.push_back(parameters.back().get());
    }
    const ParamStore store(test::context(threads, seed), pointers);
    std::vector<std::vector<float>> found;
    std::sort(pointers.begin(), pointers.end(), [](auto* x, auto* y) { return x->name() < y->name(); });
    for (const Parameter* p : pointers) found.push_back(p->value().to_vector<float>());
    return found;
  };
  const auto first = values({"first", "bias", "second", "cube"}, 7, 1);
  EXPECT_EQ(first, values({"cube", "second", "first", "bias"}, 7, 2));
  EXPECT_NE(first, values({"first", "bias", "second", "cube"}, 8, 1));
  EXPECT_NE(first[2], first[3]);  // "first" and "second" have one shape but not one stream
  double sum = 0, squares = 0;
  for (const float v : first[2]) sum += v, squares += static_cast<double>(v) * v;
  const double n = 211 * 29;
  EXPECT_NEAR(sum / n, 0.0, 4 * 0.02 / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(squares / n), 0.02, 0.02 * 4 / std::sqrt(2 * n));
}

TEST(ParamStore, ConstantInitialValues) {
  const ExecCtx ctx = test::context(1);
  Parameter zero("zero", {7}, Init::zeros()), one("one", {7}, Init::ones());
  const ParamStore store(ctx, {&zero, &one}, {.compute = DType::bf16});
  EXPECT_EQ(zero.value().to_floats(), std::vector<float>(7, 0.0f));
  EXPECT_EQ(one.value().to_floats(), std::vector<float>(7, 1.0f));
}

template <typename Short>
void check_copy_follows_the_main_weights() {
  const ExecCtx ctx = test::context(2, 3);
  Parameter w("w", {17, 19}, Init::normal(1.0f));
  ParamStore store(ctx, {&w}, {.compute = dtype_of<Short>::value});
  const auto expect_rounded = [&] {
    const auto main = store.weights().main(w).to_vector<float>();
    const auto copy = w.value().to_vector<Short>();
    for (std::size_t i = 0; i < main.size(); ++i) ASSERT_EQ(copy[i].bits, Short(main[i]).bits) << i;
  };
  EXPECT_EQ(w.value().dtype(), dtype_of<Short>::value);
  EXPECT_EQ(w.main().raw(), store.weights().main(w).raw());
  expect_rounded();
  test::edit(store.weights().main(w), [](std::vector<float>& main) {
    for (std::size_t i = 0; i < main.size(); ++i) main[i] = 0.001f * static_cast<float>(i);
  });
  store.weights().refresh_copy();
  expect_rounded();
}
TEST(ParamStore, Bf16CopyFollowsTheMainWeights) { check_copy_follows_the_main_weights<bfloat16>(); }
TEST(ParamStore, F16CopyFollowsTheMainWeights) { check_copy_follows_the_main_weights<float16>(); }

TEST(ParamStore, SplitMainWeightsHoldEveryBit) {
  const ExecCtx ctx = test::context(2, 3);
  for (const bool trainable : {true, false}) {
    Parameter whole_w("w", {17, 19}, Init::normal(1.0f)), whole_norm("norm", {19}, Init::ones());
    Parameter w("w", {17, 19}, Init::normal(1.0f)), norm("norm", {19}, Init::ones(), {.reads_main = true});
    const ParamStore whole(ctx, {&whole_w, &whole_norm}, {.compute = DType::bf16, .trainable = trainable});
    ParamStore split(ctx, {&w, &norm}, {.compute = DType::bf16, .split_main = true, .trainable = trainable});
    EXPECT_EQ(split.weights().whole(w).to_floats(), whole.weights().main(whole_w).to_floats());
    EXPECT_EQ(w.value().to_floats(), whole_w.value().to_floats());  // no tie among these
    EXPECT_EQ(norm.main().to_floats(), std::vector<float>(19, 1.0f));
    if (trainable) {
      EXPECT_EQ(split.gradient().latest_call().on_device().to_floats(), std::vector<float>(384 + 64, 0.0f));
    }
    EXPECT_THROW(w.main(), InvalidArgument);
    EXPECT_THROW(split.weights().main(w), InvalidArgument);
    EXPECT_FALSE(split.weights().main_buffer());
    Parameter alone("alone", {3}, Init::ones());  // no whole main weight beside it
    const ParamStore one(ctx, {&alone}, {.compute = DType::bf16, .split_main = true, .trainable = trainable});
    EXPECT_EQ(one.weights().whole(alone).to_floats(), std::vector<float>(3, 1.0f));
    // A tie goes away from zero in the copy, and every bit comes back.
    std::vector<float> values(17 * 19);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.001f * static_cast<float>(i) - 0.1f;
    values[0] = 1.00390625f;  // half-way between 1 and the next bfloat16
    for (const StatePiece& piece : split.pieces(PieceSet::held)) {
      if (piece.parameter == &w) piece.values.write(ctx, values.data());
    }
    split.weights().gather();
    EXPECT_EQ(split.weights().whole(w).to_floats(), values);
    EXPECT_EQ(w.value().to_floats()[0], 1.0078125f);
    EXPECT_EQ(norm.main().to_floats(), std::vector<float>(19, 1.0f));
  }
}

TEST(ParamStore, UnwrittenGradientsAreZeroedAtTheEndOfACall) {
  const ExecCtx ctx = test::context(1);
  Parameter a("a", {3}, Init::ones()), b("b", {2}, Init::ones());
  ParamStore store(ctx, {&a, &b});
  contribute(a, {1, 2, 3});
  contribute(a, {10, 20, 30});
  contribute(b, {5, 6});
  store.gradient().finish_call();
  EXPECT_EQ(gradient_of(store, a), (std::vector<float>{11, 22, 33}));
  store.gradient().discard();
  contribute(a, {7, 8, 9});  // overwrites; b stays silent
  store.gradient().finish_call();
  EXPECT_EQ(gradient_of(store, a), (std::vector<float>{7, 8, 9}));
  EXPECT_EQ(gradient_of(store, b), (std::vector<float>{0, 0}));
}

TEST(ParamStore, CallsAddUpWithTheirFactors) {
  const ExecCtx ctx = test::context(1);
  Parameter a("a", {3}, Init::ones()), b("b", {2}, Init::ones());
  ParamStore store(ctx, {&a, &b});
  for (int round = 0; round < 2; ++round) {  // the second time with the second buffer already there
    store.gradient().begin_call();
    contribute(a, {1, 2, 3});
    store.gradient().finish_call(0.5);
    EXPECT_EQ(gradient_of(store, a), (std::vector<float>{0.5, 1, 1.5}));
    store.gradient().begin_call();
    contribute(a, {10, 20, 30});
    contribute(b, {1, -1});
    store.gradient().finish_call(2);
    EXPECT_EQ(gradient_of(store, a), (std::vector<float>{20.5, 41, 61.5}));
    store.gradient().begin_call();
    contribute(b, {100, 200});
    store.gradient().finish_call(-1);
    EXPECT_EQ(store.gradient().finished_calls(), 3);
    EXPECT_EQ(gradient_of(store, a), (std::vector<float>{20.5, 41, 61.5}));
    EXPECT_EQ(gradient_of(store, b), (std::vector<float>{-98, -202}));
    EXPECT_EQ(a.grad().to_vector<float>(),
              (std::vector<float>{0, 0, 0}));  // the bucket holds the last call alone
    store.gradient().discard();
    EXPECT_EQ(store.gradient().finished_calls(), 0);
  }
}

TEST(ParamStore, ACallLeftUnfinishedIsForgotten) {
  const ExecCtx ctx = test::context(1);
  Parameter a("a", {2}, Init::ones());
  ParamStore store(ctx, {&a});
  contribute(a, {1, 1});
  store.gradient().begin_call();
  contribute(a, {2, 3});
  store.gradient().finish_call();
  store.gradient().begin_call();
  contribute(a, {50, 50});
  store.gradient().begin_call();
  contribute(a, {4, 4});
  store.gradient().finish_call();
  EXPECT_EQ(gradient_of(store, a), (std::vector<float>{6, 7}));
}

TEST(ParamStore, MisuseOfCallsIsRefused) {
  const ExecCtx ctx = test::context(1);
  Parameter a("a", {2}, Init::ones());
  ParamStore store(ctx, {&a});
  EXPECT_THROW(store.gradient().sum(), InvalidArgument);
  store.gradient().finish_call();
  EXPECT_THROW(store.gradient().finish_call(), InvalidArgument);
  Parameter b("b", {2}, Init::ones());
  EXPECT_THROW(store.weights().main(b), InvalidArgument);
  EXPECT_THROW(store.view(Tensor::empty(ctx, {3}, DType::f32), a), InvalidArgument);
}

TEST(ParamStore, RefusesUnusableParameters) {
  const ExecCtx ctx = test::context(1);
  Parameter a("a", {2}, Init::ones()), again("a", {3}, Init::ones()), empty("e", {0, 4}, Init::zeros());
  EXPECT_THROW(ParamStore(ctx, {&a, &a}), InvalidArgument);
  EXPECT_THROW(ParamStore(ctx, {&a, &again}), InvalidArgument);
  EXPECT_THROW(ParamStore(ctx, {&a, nullptr}), InvalidArgument);
  EXPECT_THROW(ParamStore(ctx, {&empty}), InvalidArgument);
  EXPECT_THROW(ParamStore(ctx, {&a}, {.compute = DType::f64}), InvalidArgument);
}

TEST(ParamStore, InferenceHoldsNoGradients) {
  const ExecCtx ctx = test::context(1);
  Parameter w("w", {500, 1000}, Init::normal(0.02f));
  ParamStore store(ctx, {&w}, {.trainable = false});
  EXPECT_FALSE(w.trained());
  EXPECT_FALSE(store.gradient().latest_call().on_device());
  EXPECT_LT(ctx.allocator->stats().used_bytes, 500'000 * 4.05);
  EXPECT_THROW(store.gradient().begin_call(), InvalidArgument);
  EXPECT_THROW(Optimizer(ctx, store, {}), InvalidArgument);
}

/// What says which group each 64 elements are in.
constexpr double kGroupBytes = 1.0 / 64;

/// Bytes per parameter after a few updates, at their highest.
double bytes_per_parameter(DType compute, int calls) {
  const ExecCtx ctx = test::context(1);
  Parameter w("w", {997, 1009}, Init::normal(0.02f)), bias("bias", {1009}, Init::zeros());
  ParamStore store(ctx, {&w, &bias}, {.compute = compute});
  Optimizer optimizer(ctx, store, {});
  for (int step = 0; step < 3; ++step) {
    for (int call = 0; call < calls; ++call) {
      store.gradient().begin_call();
      store.gradient().finish_call();
    }
    optimizer.step(1e-3, 0.1);
  }
  return static_cast<double>(ctx.allocator->stats().peak_used_bytes) / (998.0 * 1009.0);
}

TEST(ParamStore, TakesSixteenBytesPerParameterInFp32AndEighteenWithACopy) {
  EXPECT_NEAR(bytes_per_parameter(DType::f32, 1), 16 + kGroupBytes, 0.02);
  EXPECT_NEAR(bytes_per_parameter(DType::bf16, 1), 18 + kGroupBytes, 0.02);
  EXPECT_NEAR(bytes_per_parameter(DType::f16, 1), 18 + kGroupBytes, 0.02);
}

TEST(ParamStore, TheSecondGradientBufferExistsOnlyFromTheSecondCallOn) {
  EXPECT_NEAR(bytes_per_parameter(DType::f32, 2), 20 + kGroupBytes, 0.02);
  EXPECT_NEAR(bytes_per_parameter(DType::f32, 5), 20 + kGroupBytes, 0.02);
}

}  // namespace
}  // namespace tessera
