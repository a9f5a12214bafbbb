/// Updates against PyTorch 2's (torch.optim in float64, literal tables), and against the formulas in double.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/vector/optimizer.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_same;

constexpr int kCount = 5;
constexpr float kStart[kCount] = {0.5f, -1.25f, 2.0f, 0.0f, -0.75f};
/// Gradients of three steps; the optimizer sees half of them (grad_scale).
constexpr float kGradients[3][kCount] = {{0.1f, -0.2f, 0.3f, 1.0f, -2.0f},
                                         {0.05f, 0.4f, -0.6f, 0.001f, 1.5f},
                                         {-0.3f, 0.25f, 0.0f, -0.5f, 0.125f}};

void expect_table(const float* got, const double (&want)[kCount]) {
  for (int i = 0; i < kCount; ++i) EXPECT_NEAR(got[i], want[i], 3e-7) << "element " << i;
}

/// Decides an update at learning rate 0.05 and weight decay 0.1, the gradients halved.
void begin(UpdateState& state, double beta1, double beta2) {
  BeginUpdate params{
      .state = &state, .grad_scale = 0.5, .beta1 = beta1, .beta2 = beta2, .base = state.updates};
  params.rates[0] = {.lr = 0.05, .weight_decay = 0.1};
  cpu::begin_update(params, {});
}

void check_adam(Adam params, const double (&want)[kCount]) {
  float main[kCount], m[kCount] = {}, v[kCount] = {};
  std::copy(kStart, kStart + kCount, main);
  UpdateState state;
  for (int step = 1; step <= 3; ++step) {
    begin(state, params.beta1, params.beta2);
    params.n = kCount;
    params.state = &state;
    params.grad = kGradients[step - 1];
    params.main = main;
    params.m = m;
    params.v = v;
    cpu::adam(params, {});
  }
  expect_table(main, want);
}

TEST(Adam, DecoupledEqualsTorchAdamW) {
  check_adam({.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-3, .decoupled = true},
             {0.415287230035, -1.22799759208, 1.95313141493, -0.0921020887934, -0.683020272311});
}

TEST(Adam, CoupledEqualsTorchAdam) {
  check_adam({.beta1 = 0.8, .beta2 = 0.999, .eps = 1e-8, .decoupled = false},
             {0.399523490479, -1.1726429274, 1.90256858137, -0.0847577672526, -0.690227251486});
}

void check_sgd(Sgd params, const double (&want)[kCount]) {
  float main[kCount], buffer[kCount] = {};
  std::copy(kStart, kStart + kCount, main);
  UpdateState state;
  for (const auto& gradient : kGradients) {
    begin(state, 0, 0);
    params.n = kCount;
    params.state = &state;
    params.grad = gradient;
    params.main = main;
    params.buffer = params.momentum != 0.0f ? buffer : nullptr;
    cpu::sgd(params, {});
  }
  expect_table(main, want);
}

TEST(Sgd, EqualsTorch) {
  check_sgd({}, {0.496318625, -1.24259346875, 1.9776495625, -0.0122755, -0.72974240625});
  check_sgd({.momentum = 0.9f}, {0.484438625, -1.22683221875, 1.9523820625, -0.054823, -0.66868865625});
  check_sgd({.momentum = 0.9f, .nesterov = true},
            {0.482466780125, -1.22198339591, 1.93517532419, -0.061009335625, -0.657577933219});
}

struct State {
  explicit State(std::int64_t n)
      : grad(Buffer::random(DType::f32, n, 1)),
        main(Buffer::random(DType::f32, n, 2)),
        m(Buffer::random(DType::f32, n, 3)),
        v(Buffer::random(DType::f32, n, 4, 0.5, 0.5)),
        model(DType::bf16, n) {}
  Buffer grad, main, m, v, model;
  UpdateState state{
      .grad_factor = 0.7, .lr = 0.01, .weight_decay = 0.1, .correction1 = 0.19, .correction2 = 0.0975};

  Adam adam(std::int64_t begin, std::int64_t end) {
    return {.n = end - begin,
            .beta1 = 0.9,
            .beta2 = 0.95,
            .eps = 1e-6,
            .state = &state,
            .grad = grad.floats() + begin,
            .main = main.floats() + begin,
            .m = m.floats() + begin,
            .v = v.floats() + begin,
            .model = static_cast<bfloat16*>(model.data()) + begin};
  }
  Sgd sgd(std::int64_t begin, std::int64_t end) {
    return {.n = end - begin,
            .momentum = 0.9f,
            .nesterov = true,
            .state = &state,
            .grad = grad.floats() + begin,
            .main = main.floats() + begin,
            .buffer = m.floats() + begin,
            .model = static_cast<bfloat16*>(model.data()) + begin};
  }
};

void expect_same_state(const State& a, const State& b) {
  expect_same(a.main, b.main);
  expect_same(a.m, b.m);
  expect_same(a.v, b.v);
  expect_same(a.model, b.model);
}

void expect_model_is_rounded_main(const State& s) {
  for (std::int64_t i = 0; i < s.main.size(); ++i) {
    ASSERT_EQ(s.model[i], static_cast<float>(bfloat16(static_cast<float>(s.main[i])))) << "element " << i;
  }
}

TEST(Adam, EveryCopyFollowsTheFormula) {
  const AdamFactors factors{.grad = 0.7f,
                            .decay = 0.999f,
                            .l2 = 0.02f,
                            .blend1 = 0.1f,
                            .beta2 = 0.95f,
                            .blend2 = 0.05f,
                            .step = 0.05f,
                            .root = 3.2f,
                            .eps = 1e-6f};
  for (std::int64_t n : {1, 3, 16, 31, 101}) {
    for (auto [isa, adam] : TESSERA_COPIES(adam_range)) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(isa) << ", " << n);
      State s(n);
      const State before(s);
      adam(s.adam(0, n), factors, 0, n);
      for (std::int64_t i = 0; i < n; ++i) {
        const double g = before.grad[i] * 0.7 + 0.02 * before.main[i];
        const double m = before.m[i] + 0.1 * (g - before.m[i]);
        const double v = before.v[i] * 0.95 + 0.05 * g * g;
        ASSERT_NEAR(s.m[i], m, 2e-7);
        ASSERT_NEAR(s.v[i], v, 2e-7);
        ASSERT_NEAR(s.main[i], before.main[i] * 0.999 - 0.05 * m / (std::sqrt(v) * 3.2 + 1e-6), 3e-7);
      }
      expect_model_is_rounded_main(s);
    }
  }
}

TEST(Sgd, EveryCopyFollowsTheFormula) {
  for (std::int64_t n : {1, 3, 16, 31, 101}) {
    for (auto [isa, sgd] : TESSERA_COPIES(sgd_range)) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(isa) << ", " << n);
      State s(n);
      const State before(s);
      sgd(s.sgd(0, n), 0, n);
      for (std::int64_t i = 0; i < n; ++i) {
        const double g = before.grad[i] * 0.7 + 0.1 * before.main[i];
        const double momentum = 0.9 * before.m[i] + g;
        ASSERT_NEAR(s.m[i], momentum, 3e-7);
        ASSERT_NEAR(s.main[i], before.main[i] - 0.01 * (g + 0.9 * momentum), 2e-7);
      }
      expect_model_is_rounded_main(s);
    }
  }
}

TEST(Optimizers, NeitherThreadsNorShardsChangeABit) {
  const std::int64_t n = 20011;
  State one(n), two(n), shards(n);
  cpu::adam(one.adam(0, n), {.threads = 1});
  cpu::sgd(one.sgd(0, n), {.threads = 1});
  cpu::adam(two.adam(0, n), {.threads = 2});
  cpu::sgd(two.sgd(0, n), {.threads = 2});
  const std::int64_t cuts[] = {0, 1, 6, 37, 5000, 5003, 12345, n};
  for (int i = 0; i < 7; ++i) {
    cpu::adam(shards.adam(cuts[i], cuts[i + 1]), {});
    cpu::sgd(shards.sgd(cuts[i], cuts[i + 1]), {});
  }
  expect_same_state(one, two);
  expect_same_state(one, shards);
}

TEST(Optimizers, ASkippedUpdateChangesNothing) {
  State s(67);
  const State before(s);
  s.state.skip = 1;
  cpu::adam(s.adam(0, 67), {});
  cpu::sgd(s.sgd(0, 67), {});
  expect_same_state(s, before);
}

TEST(BeginUpdate, NormClippingAndRates) {
  UpdateState state{.squares = 400.0, .updates = 7, .loss_scale = 4.0f};
  BeginUpdate params{.state = &state,
                     .grad_scale = 0.5,
                     .clip_grad = 1.0,
                     .beta1 = 0.9,
                     .beta2 = 0.99,
                     .base = 6,
                     .num_rates = 2};
  params.rates[0] = {.lr = 1.0, .weight_decay = 0.1};
  params.rates[1] = {.lr = 2.0, .weight_decay = 0.2};
  cpu::begin_update(params, {});
  EXPECT_EQ(state.skip, 0);
  EXPECT_EQ(state.squares, 0.0);
  EXPECT_DOUBLE_EQ(state.grad_norm, 20.0 * 0.5 / 4.0);
  EXPECT_DOUBLE_EQ(state.clip_factor, 1.0 / (2.5 + 1e-6));
  EXPECT_DOUBLE_EQ(state.grad_factor, 0.125 / (2.5 + 1e-6));
  EXPECT_EQ(state.updates, 8);
  EXPECT_EQ(state.lr, 2.0);  // one update after base: the second
  EXPECT_EQ(state.weight_decay, 0.2);
  EXPECT_DOUBLE_EQ(state.correction1, 1.0 - std::pow(0.9, 8));
  EXPECT_DOUBLE_EQ(state.correction2, 1.0 - std::pow(0.99, 8));
}

TEST(BeginUpdate, WhatIsNotFiniteIsSkipped) {
  for (const double squares : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    UpdateState state{.squares = squares, .lr = 0.5, .updates = 3};
    BeginUpdate params{.state = &state, .clip_grad = 1.0, .base = 3};
    params.rates[0] = {.lr = 1.0, .weight_decay = 0.1};
    cpu::begin_update(params, {});
    EXPECT_EQ(state.skip, 1);
    EXPECT_EQ(state.updates, 3);
    EXPECT_EQ(state.squares, 0.0);
    EXPECT_FALSE(std::isfinite(state.grad_norm));
    EXPECT_EQ(state.lr, 0.5);
  }
}

TEST(Optimizers, ModelCopyIsOptional) {
  const std::int64_t n = 67;
  State with(n), without(n);
  cpu::adam(with.adam(0, n), {});
  cpu::sgd(with.sgd(0, n), {});
  Adam adam = without.adam(0, n);
  adam.model = nullptr;
  cpu::adam(adam, {});
  Sgd sgd = without.sgd(0, n);
  sgd.model = nullptr;
  cpu::sgd(sgd, {});
  expect_same(with.main, without.main);
  for (std::int64_t i = 0; i < n; ++i) EXPECT_EQ(without.model[i], 0.0);
}

}  // namespace
}  // namespace tessera::kernels
