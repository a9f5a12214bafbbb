/// The optimizers against what torch.optim computes (make_trajectories.py), and against each other.
#include <gtest/gtest.h>

#include <memory>

#include "tessera/optim/optimizer.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

struct Trajectory {
  const char* name;
  OptimizerName optimizer;
  double lr;
  std::vector<double> betas;
  double eps, weight_decay, momentum;
  bool nesterov;
  double clip;
  std::vector<double> norms;                 // before each of the updates
  std::vector<std::vector<double>> weights;  // after the last
};

const std::vector<Trajectory>& trajectories() {
  static const std::vector<Trajectory> table = {
#include "trajectories.inc"
  };
  return table;
}

float initial_weight(int k, int i) { return static_cast<float>((i * 53 + 7 * k) % 89 - 44) / 128; }
float gradient(int k, int step, int i) {
  return static_cast<float>((i * 37 + k * 59 + step * 101 + 11) % 97 - 48) / 64;
}

struct Trainer {
  Trainer(const Trajectory& t, int threads, DType compute) : ctx(test::context(threads)) {
    store = std::make_unique<ParamStore>(ctx, std::vector<Parameter*>{&a, &b, &c},
                                         ParamStoreOptions{.compute = compute});
    for (int k = 0; k < 3; ++k) {
      test::edit(store->weights().main(*store->parameters()[k]), [&](std::vector<float>& main) {
        for (std::size_t i = 0; i < main.size(); ++i) main[i] = initial_weight(k, static_cast<int>(i));
      });
    }
    store->weights().refresh_copy();
    optimizer = std::make_unique<Optimizer>(ctx, *store,
                                            OptimizerConfig{.name = t.optimizer,
                                                            .lr = t.lr,
                                                            .betas = t.betas,
                                                            .eps = t.eps,
                                                            .weight_decay = t.weight_decay,
                                                            .momentum = t.momentum,
                                                            .nesterov = t.nesterov,
                                                            .clip_grad = t.clip});
  }
  /// One update; the gradient arrives scaled by 1 / factor and leaves with that factor.
  StepResult update(const Trajectory& t, int step, double factor = 1.0) {
    for (int k = 0; k < 3; ++k) {
      Parameter& p = *store->parameters()[k];
      EXPECT_EQ(p.next_beta(), 0.0f);
      test::edit(p.grad(), [&](std::vector<float>& grad) {
        for (std::size_t i = 0; i < grad.size(); ++i)
          grad[i] = static_cast<float>(gradient(k, step, static_cast<int>(i)) / factor);
      });
    }
    store->gradient().finish_call(factor);
    return optimizer->step(t.lr * (1 - step / 20.0), t.weight_decay);
  }

  ExecCtx ctx;
  Parameter a{"layer.weight", {3, 7}, Init::normal(0.1f)};
  Parameter b{"layer.bias", {5}, Init::zeros()};
  Parameter c{"other.weight", {2, 2}, Init::ones()};
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<Optimizer> optimizer;
};

void play(Trainer& trainer, const Trajectory& t, double factor = 1.0) {
  for (std::size_t step = 0; step < t.norms.size(); ++step) {
    const StepResult result = trainer.update(t, static_cast<int>(step), factor);
    EXPECT_FALSE(result.skipped);
    EXPECT_NEAR(result.grad_norm, t.norms[step], 1e-6);
  }
}

void expect_weights(const Trainer& trainer, const Trajectory& t) {
  for (std::size_t k = 0; k < 3; ++k) {
    const auto main = trainer.store->weights().main(*trainer.store->parameters()[k]).to_vector<float>();
    ASSERT_EQ(main.size(), t.weights[k].size());
    for (std::size_t i = 0; i < main.size(); ++i)
      EXPECT_NEAR(main[i], t.weights[k][i], 1e-6) << k << ", " << i;
  }
}

class Trajectories : public testing::TestWithParam<int> {};

TEST_P(Trajectories, AgreeWithPyTorch) {
  ASSERT_EQ(trajectories().size(), 8u);
  for (const Trajectory& t : trajectories()) {
    SCOPED_TRACE(t.name);
    Trainer trainer(t, GetParam(), DType::f32);
    play(trainer, t);
    expect_weights(trainer, t);
    EXPECT_EQ(trainer.optimizer->updates(), 7);
  }
}

TEST_P(Trajectories, ACallsFactorScalesItsGradient) {
  for (const Trajectory& t : trajectories()) {
    SCOPED_TRACE(t.name);
    Trainer trainer(t, GetParam(), DType::f32);
    play(trainer, t, 0.125);
    expect_weights(trainer, t);
  }
}

TEST_P(Trajectories, Bf16CopyIsTheRoundedMainWeight) {
  for (const Trajectory& t : trajectories()) {
    SCOPED_TRACE(t.name);
    Trainer trainer(t, GetParam(), DType::bf16);
    play(trainer, t);
    expect_weights(trainer, t);  // main weights do not feel the copy
    for (const Parameter* p : trainer.store->parameters()) {
      const auto main = trainer.store->weights().main(*p).to_vector<float>();
      const auto copy = p->value().to_vector<bfloat16>();
      for (std::size_t i = 0; i < main.size(); ++i) EXPECT_EQ(copy[i].bits, bfloat16(main[i]).bits);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, Trajectories, testing::Values(1, 2));

TEST(Trajectory, ResumedFromStateIsBitwiseTheSame) {
  for (const Trajectory& t : trajectories()) {
    SCOPED_TRACE(t.name);
    Trainer straight(t, 1, DType::f32), first(t, 1, DType::f32), second(t, 2, DType::f32);
    for (int step = 0; step < 7; ++step) straight.update(t, step);
    for (int step = 0; step < 4; ++step) first.update(t, step);

    second.store->weights().main_buffer().copy_from_host(
        first.store->weights().main_buffer().to_host().raw());
    const auto from = first.optimizer->state();
    const auto to = second.optimizer->state();
    ASSERT_EQ(from.size(), to.size());
    for (std::size_t i = 0; i < from.size(); ++i) {
      ASSERT_EQ(from[i].name, to[i].name);
      to[i].tensor.copy_from_host(from[i].tensor.to_host().raw());
    }
    second.optimizer->set_update_state(first.optimizer->update_state());
    for (int step = 4; step < 7; ++step) second.update(t, step);
    EXPECT_EQ(straight.store->weights().main_buffer().to_vector<float>(),
              second.store->weights().main_buffer().to_vector<float>());
  }
}

}  // namespace
}  // namespace tessera
