#include "tessera/optim/optimizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "tests/support/device.hpp"

namespace tessera {
namespace {

void set_gradient(Parameter& p, float value) {
  p.next_beta();
  test::edit(p.grad(), [&](std::vector<float>& grad) { grad.assign(grad.size(), value); });
}

struct Model {
  explicit Model(OptimizerConfig config, DType compute = DType::f32)
      : store(ctx, {&embedding, &norm, &weight, &bias}, {.compute = compute}),
        optimizer(ctx, store, config) {}

  StepResult update(float gradient, double lr = 0.1, double weight_decay = 0.5) {
    for (Parameter* p : store.parameters()) set_gradient(*p, gradient);
    store.gradient().finish_call();
    return optimizer.step(lr, weight_decay);
  }
  /// Everything an update may change, as bytes.
  std::vector<std::vector<float>> everything() const {
    std::vector<std::vector<float>> all = {store.weights().main_buffer().to_vector<float>()};
    if (store.weights().model_buffer()) all.push_back(store.weights().model_buffer().to_floats());
    for (const auto& piece : optimizer.state()) all.push_back(piece.tensor.to_vector<float>());
    return all;
  }

  ExecCtx ctx = test::context(1, 5);
  Parameter embedding{"embedding.word_embeddings.weight", {11, 3}, Init::normal(0.5f)};
  Parameter norm{"decoder.final_layernorm.weight", {3}, Init::ones()};
  Parameter weight{"decoder.layers.0.mlp.linear_fc1.weight", {16, 4}, Init::normal(0.5f)};
  Parameter bias{"decoder.layers.0.mlp.linear_fc1.bias", {5}, Init::ones()};
  ParamStore store;
  Optimizer optimizer;
};

TEST(Optimizer, DecaysMatricesButNotVectorsNorNamedOnes) {
  Model model({.no_decay = {"embedding.*"}});
  EXPECT_FALSE(model.optimizer.decays(model.embedding));
  EXPECT_FALSE(model.optimizer.decays(model.norm));
  EXPECT_TRUE(model.optimizer.decays(model.weight));
  EXPECT_FALSE(model.optimizer.decays(model.bias));

  const auto embedding = model.embedding.value().to_vector<float>();
  const auto weight = model.weight.value().to_vector<float>();
  model.update(0.0f);  // without a gradient only the decay acts: by lr * weight_decay = 5 %
  EXPECT_EQ(model.embedding.value().to_vector<float>(), embedding);
  EXPECT_EQ(model.norm.value().to_vector<float>(), std::vector<float>(3, 1.0f));
  EXPECT_EQ(model.bias.value().to_vector<float>(), std::vector<float>(5, 1.0f));
  for (std::size_t i = 0; i < weight.size(); ++i) {
    EXPECT_NEAR(model.weight.value().to_vector<float>()[i], 0.95f * weight[i], 1e-7);
  }
}

TEST(Optimizer, GlobsMatchWholeNames) {
  Parameter x("a.b.weight", {2, 2}, Init::ones()), y("a.b.weight_g", {2, 2}, Init::ones()),
      z("b.weight", {2, 2}, Init::ones());
  const ExecCtx ctx = test::context(1);
  ParamStore store(ctx, {&x, &y, &z});
  const Optimizer optimizer(ctx, store, {.no_decay = {"b.weight", "*_?"}});
  EXPECT_TRUE(optimizer.decays(x));
  EXPECT_FALSE(optimizer.decays(y));
  EXPECT_FALSE(optimizer.decays(z));
}

TEST(Optimizer, GapsBetweenParametersStayZero) {
  for (const auto name : {OptimizerName::adamw, OptimizerName::adam, OptimizerName::sgd}) {
    Model model({.name = name}, DType::bf16);
    for (int step = 0; step < 3; ++step) model.update(0.3f);
    std::vector<bool> owned(static_cast<std::size_t>(model.store.numel()), false);
    for (const ParamSlot& slot : model.store.slots()) {
      for (std::int64_t i = 0; i < slot.numel; ++i) owned[static_cast<std::size_t>(slot.offset + i)] = true;
    }
    const auto main = model.store.weights().main_buffer().to_vector<float>();
    const auto copy = model.store.weights().model_buffer().to_floats();
    const auto grad = model.store.gradient().latest_call().on_device().to_vector<float>();
    for (std::size_t i = 0; i < owned.size(); ++i) {
      EXPECT_TRUE(owned[i] || (main[i] == 0 && copy[i] == 0 && grad[i] == 0)) << i;
    }
  }
}

TEST(Optimizer, ClipsByTheGlobalNorm) {
  Model model({.name = OptimizerName::sgd, .momentum = 0.0, .clip_grad = 2.0});
  const auto before = model.bias.value().to_vector<float>();
  const StepResult result = model.update(3.0f, 0.1, 0.0);
  const double norm = 3.0 * std::sqrt(33.0 + 3 + 64 + 5);
  EXPECT_NEAR(result.grad_norm, norm, 1e-9);
  EXPECT_DOUBLE_EQ(result.clip_factor, 2.0 / (norm + 1e-6));
  EXPECT_NEAR(model.bias.value().to_vector<float>()[0], before[0] - 0.1 * 3.0 * 2.0 / norm, 1e-6);

  const StepResult small = model.update(0.01f, 0.1, 0.0);
  EXPECT_EQ(small.clip_factor, 1.0);
}

TEST(Optimizer, ZeroClipMeansNoClippingButANorm) {
  Model model({.clip_grad = 0.0});
  const StepResult result = model.update(100.0f);
  EXPECT_EQ(result.clip_factor, 1.0);
  EXPECT_NEAR(result.grad_norm, 100 * std::sqrt(105.0), 1e-9);
}

TEST(Optimizer, TheNormDoesNotOverflowInFp32) {
  Model model({.name = OptimizerName::sgd, .momentum = 0.0, .clip_grad = 1.0});
  const StepResult result = model.update(1e30f, 0.1, 0.0);
  EXPECT_FALSE(result.skipped);
  EXPECT_NEAR(result.grad_norm / (1e30 * std::sqrt(105.0)), 1.0, 1e-6);
}

class Skipping : public testing::TestWithParam<std::tuple<OptimizerName, DType, float>> {};

TEST_P(Skipping, AGradientThatIsNotFiniteChangesNothing) {
  const auto [name, compute, poison] = GetParam();
  Model model({.name = name}, compute);
  model.update(0.25f);
  const auto before = model.everything();

  for (Parameter* p : model.store.parameters()) set_gradient(*p, 0.5f);
  test::edit(model.weight.grad(), [value = poison](auto& grad) { grad[14] = value; });
  model.store.gradient().finish_call();
  const StepResult result = model.optimizer.step(0.1, 0.5);
  EXPECT_TRUE(result.skipped);
  EXPECT_FALSE(std::isfinite(result.grad_norm));
  EXPECT_EQ(model.everything(), before);
  EXPECT_EQ(model.optimizer.updates(), 1);

  // The poison is gone with its call: training goes on as if the step had not been.
  Model clean({.name = name}, compute);
  clean.update(0.25f);
  clean.update(-0.5f);
  EXPECT_FALSE(model.update(-0.5f).skipped);
  EXPECT_EQ(model.everything(), clean.everything());
}

INSTANTIATE_TEST_SUITE_P(Values, Skipping,
                         testing::Combine(testing::Values(OptimizerName::adamw, OptimizerName::adam,
                                                          OptimizerName::sgd),
                                          testing::Values(DType::f32, DType::bf16),
                                          testing::Values(std::numeric_limits<float>::infinity(),
                                                          std::numeric_limits<float>::quiet_NaN())));

/// Launches the update for a gradient that is `value` everywhere, with rates that tell the number of updates.
void launch(Model& model, float value) {
  for (Parameter* p : model.store.parameters()) set_gradient(*p, value);
  model.store.gradient().finish_call();
  model.optimizer.launch_step([](std::int64_t updates) {
    return UpdateRates{0.1 / static_cast<double>(updates + 1), 0.5};
  });
}

TEST(Optimizer, UpdatesLaunchedAheadOfTheirResultsAreTheSame) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> gradients = {0.25f, inf, -0.5f, inf, inf, 0.125f, 0.5f};
  Model waits({}), ahead({});
  std::vector<StepResult> a, b;
  for (const float gradient : gradients) {
    launch(waits, gradient);
    a.push_back(waits.optimizer.finish_step());
    launch(ahead, gradient);  // which rates are right depends on results not read yet
    if (b.size() + 3 == a.size()) b.push_back(ahead.optimizer.finish_step());
  }
  while (b.size() < a.size()) b.push_back(ahead.optimizer.finish_step());
  EXPECT_EQ(waits.everything(), ahead.everything());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].skipped, !std::isfinite(gradients[i]));
    EXPECT_EQ(a[i].skipped, b[i].skipped);
    EXPECT_EQ(a[i].clip_factor, b[i].clip_factor);
  }
  EXPECT_EQ(ahead.optimizer.updates(), 4);
  EXPECT_THROW(ahead.optimizer.finish_step(), InvalidArgument);
}

TEST(Optimizer, TakesNoMoreUpdatesThanItHasRatesFor) {
  Model model({});
  for (int i = 0; i < 3; ++i) launch(model, 0.1f);
  EXPECT_THROW(launch(model, 0.1f), InvalidArgument);
  EXPECT_THROW(model.optimizer.update_state(), InvalidArgument);
}

TEST(Optimizer, TheLossScaleIsTakenOutAgain) {
  const LossScale scale{.first = 1024.0f, .rule = {.growth_interval = 2}};
  Model plain({}), scaled({});
  Optimizer optimizer(scaled.ctx, scaled.store, {}, scale);
  EXPECT_FALSE(plain.optimizer.loss_scale());
  float factor = 1024.0f;
  for (int step = 0; step < 4; ++step) {
    ASSERT_EQ(optimizer.loss_scale().to_floats(), std::vector<float>{factor});
    plain.update(0.25f);
    for (Parameter* p : scaled.store.parameters()) set_gradient(*p, 0.25f * factor);
    scaled.store.gradient().finish_call();
    const StepResult result = optimizer.step(0.1, 0.5);
    if (step % 2 == 1) factor *= 2;  // two good steps
    EXPECT_EQ(result.loss_scale, factor);
    EXPECT_EQ(plain.store.weights().main_buffer().to_vector<float>(),
              scaled.store.weights().main_buffer().to_vector<float>());
  }
}

TEST(Optimizer, AFactorThatIsNotFiniteIsSkippedToo) {
  Model model({});
  const auto before = model.everything();
  for (Parameter* p : model.store.parameters()) set_gradient(*p, 0.5f);
  model.store.gradient().finish_call(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(model.optimizer.step(0.1, 0.5).skipped);
  EXPECT_EQ(model.everything(), before);
}

TEST(Optimizer, SeveralCallsUpdateAsTheirSumWould) {
  Model parts({}), whole({});
  for (int step = 0; step < 3; ++step) {
    for (const auto& [value, factor] : {std::pair{0.5f, 0.25}, {-1.0f, 0.5}, {2.0f, 0.25}}) {
      parts.store.gradient().begin_call();
      for (Parameter* p : parts.store.parameters()) set_gradient(*p, value);
      parts.store.gradient().finish_call(factor);
    }
    const StepResult a = parts.optimizer.step(0.1, 0.5);
    const StepResult b = whole.update(0.125f);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
    EXPECT_EQ(parts.everything(), whole.everything());
  }
}

TEST(Optimizer, StateNamesAndShapes) {
  Model adam({});
  const auto state = adam.optimizer.state();
  ASSERT_EQ(state.size(), 8u);
  EXPECT_EQ(state[0].name, "adam_m.embedding.word_embeddings.weight");
  EXPECT_EQ(state[0].tensor.shape(), (Shape{11, 3}));
  EXPECT_EQ(state[0].parameter, &adam.embedding);
  EXPECT_EQ(state[7].name, "adam_v.decoder.layers.0.mlp.linear_fc1.bias");
  Model sgd({.name = OptimizerName::sgd});
  ASSERT_EQ(sgd.optimizer.state().size(), 4u);
  EXPECT_EQ(sgd.optimizer.state()[1].name, "momentum.decoder.final_layernorm.weight");
  EXPECT_TRUE(Model({.name = OptimizerName::sgd, .momentum = 0.0}).optimizer.state().empty());
}

TEST(Optimizer, RefusesWhatNoUpdateCanUse) {
  EXPECT_THROW(Model({.betas = {0.9}}), ConfigError);
  EXPECT_THROW(Model({.betas = {0.9, 1.0}}), ConfigError);
  EXPECT_THROW(Model({.eps = 0.0}), ConfigError);
  EXPECT_THROW(Model({.clip_grad = -1.0}), ConfigError);
  EXPECT_THROW(Model({.name = OptimizerName::sgd, .momentum = 1.5}), ConfigError);
  EXPECT_THROW(Model({.name = OptimizerName::sgd, .momentum = 0.0, .nesterov = true}), ConfigError);
  Model model({});
  EXPECT_THROW(model.optimizer.step(0.1, 0.1), InvalidArgument);  // no gradients
  EXPECT_THROW(model.optimizer.set_update_state({.updates = -1}), InvalidArgument);
  model.store.gradient().finish_call();
  EXPECT_THROW(model.optimizer.step(std::nan(""), 0.1), InvalidArgument);
}

TEST(Optimizer, ASteadyStateAsksTheSystemForNothing) {
  Model model({}, DType::bf16);
  model.update(0.1f);
  const auto before = model.ctx.allocator->stats().system_allocations;
  for (int step = 0; step < 5; ++step) model.update(0.1f);
  EXPECT_EQ(model.ctx.allocator->stats().system_allocations, before);
}

}  // namespace
}  // namespace tessera
