/// Parameter groups on one rank: against a plain loop over elements, and what is refused.

#include "tessera/optim/param_groups.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "tessera/optim/optimizer.hpp"
#include "tessera/parallel/functions.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

float gradient(std::size_t parameter, int step, std::size_t i) {
  return static_cast<float>(
             static_cast<int>((i * 37 + parameter * 59 + static_cast<std::size_t>(step) * 101) % 97) - 48) /
         64;
}

/// Group n of parameters whose name begins with the digit n.
ParamGroups by_first_digit(std::vector<ParamGroup> groups) {
  return {std::move(groups), [](const Parameter& p) { return static_cast<std::size_t>(p.name()[0] - '0'); }};
}

struct Trainer {
  explicit Trainer(const OptimizerConfig& config, std::vector<ParamGroup> groups, DType compute = DType::f32,
                   bool store_knows = true, const LossScale& scale = {}) {
    const ParamGroups all = by_first_digit(std::move(groups));
    ParamStoreOptions options{.compute = compute};
    if (store_knows) options.frozen = [all](const Parameter& p) { return all.freezes(p); };
    store = std::make_unique<ParamStore>(ctx, std::vector<Parameter*>{&a, &b, &c, &d, &e}, options);
    optimizer = std::make_unique<Optimizer>(ctx, *store, config, scale, all);
  }
  void write(int step, float factor = 1) {
    fill(step, factor);
    store->gradient().finish_call();
  }
  void fill(int step, float factor = 1) {
    for (std::size_t k = 0; k < 5; ++k) {
      Parameter& p = *store->parameters()[k];
      if (!p.trained()) continue;
      p.next_beta();
      test::edit(p.grad(), [&](std::vector<float>& grad) {
        for (std::size_t i = 0; i < grad.size(); ++i) grad[i] = factor * gradient(k, step, i);
      });
    }
  }
  StepResult update(int step, const std::vector<UpdateRates>& rates) {
    write(step);
    optimizer->launch_step([&](std::int64_t) { return rates; });
    return optimizer->finish_step();
  }
  std::map<std::string, std::vector<float>> weights() const {
    std::map<std::string, std::vector<float>> all;
    for (const Parameter* p : store->parameters())
      all[p->name()] = store->weights().main(*p).to_vector<float>();
    return all;
  }

  ExecCtx ctx = test::context(2, 3);
  Parameter a{"0.a", {13, 21}, Init::normal(0.5f)};  // more than four blocks
  Parameter b{"1.b", {7}, Init::ones()};
  Parameter c{"2.c", {64}, Init::normal(0.5f)};
  Parameter d{"0.d", {5}, Init::ones()};
  Parameter e{"1.e", {65, 3}, Init::normal(0.5f)};
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<Optimizer> optimizer;
};

/// What torch.optim does to each element, in double: one dictionary of values for each group and step.
class Reference {
 public:
  Reference(const Trainer& trainer, const OptimizerConfig& config) : config_(config) {
    for (const auto& [name, values] : trainer.weights()) {
      main_[name].assign(values.begin(), values.end());
      m_[name].resize(values.size());
      v_[name].resize(values.size());
    }
  }
  void step(const Trainer& trainer, int step, const std::vector<ParamGroup>& groups,
            const std::vector<UpdateRates>& rates) {
    ++steps_;
    for (std::size_t k = 0; k < 5; ++k) {
      const std::string& name = trainer.store->parameters()[k]->name();
      const auto group = static_cast<std::size_t>(name[0] - '0');
      if (groups[group].frozen) continue;
      for (std::size_t i = 0; i < main_[name].size(); ++i)
        element(main_[name][i], m_[name][i], v_[name][i], static_cast<double>(gradient(k, step, i)),
                groups[group], rates[group]);
    }
  }
  void expect(const Trainer& trainer) const {
    for (const auto& [name, values] : trainer.weights()) {
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(values[i], main_.at(name)[i], 2e-6) << name << " " << i;
    }
  }

 private:
  void element(double& w, double& m, double& v, double g, const ParamGroup& group, const UpdateRates& rates) {
    if (config_.name == OptimizerName::sgd) {
      const double mu = group.momentum.value_or(config_.momentum);
      g += rates.weight_decay * w;
      if (mu != 0) {
        m = mu * m + g;
        g = config_.nesterov ? g + mu * m : m;
      }
      w -= rates.lr * g;
      return;
    }
    const double beta1 = group.beta1.value_or(config_.betas[0]),
                 beta2 = group.beta2.value_or(config_.betas[1]);
    if (config_.name == OptimizerName::adamw) {
      w -= rates.lr * rates.weight_decay * w;
    } else {
      g += rates.weight_decay * w;
    }
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    const double root = std::sqrt(v) / std::sqrt(1 - std::pow(beta2, steps_));
    w -= rates.lr / (1 - std::pow(beta1, steps_)) * m / (root + group.eps.value_or(config_.eps));
  }

  OptimizerConfig config_;
  int steps_ = 0;
  std::map<std::string, std::vector<double>> main_, m_, v_;
};

const std::vector<OptimizerConfig> kConfigs = {
    {.name = OptimizerName::adamw, .eps = 1e-5, .clip_grad = 0},
    {.name = OptimizerName::adam, .eps = 1e-5, .clip_grad = 0},
    {.name = OptimizerName::sgd, .momentum = 0.9, .clip_grad = 0},
    {.name = OptimizerName::sgd, .momentum = 0.8, .nesterov = true, .clip_grad = 0}};

std::vector<ParamGroup> three_groups(const OptimizerConfig& config) {
  if (config.name == OptimizerName::sgd) return {{}, {.momentum = 0.5}, {.momentum = 0.1}};
  return {{}, {.beta1 = 0.5, .beta2 = 0.8}, {.beta1 = 0.0, .eps = 1e-2}};
}

/// Rates of a step, different for each group and step.
std::vector<UpdateRates> rates_of(int step) {
  return {{0.02 / (step + 1), 0.1}, {0.05, 0.02 * step}, {0.01 * step, 0.0}};
}

class Groups : public ::testing::TestWithParam<DType> {};

TEST_P(Groups, EachGroupIsUpdatedWithItsOwnValues) {
  for (const OptimizerConfig& config : kConfigs) {
    SCOPED_TRACE(::testing::Message() << static_cast<int>(config.name) << " nesterov " << config.nesterov);
    const std::vector<ParamGroup> groups = three_groups(config);
    Trainer trainer(config, groups, GetParam());
    Reference reference(trainer, config);
    for (int step = 0; step < 5; ++step) {
      trainer.update(step, rates_of(step));
      reference.step(trainer, step, groups, rates_of(step));
    }
    reference.expect(trainer);
    for (const Parameter* p : trainer.store->parameters()) {
      const auto main = trainer.store->weights().main(*p).to_vector<float>(), value = p->value().to_floats();
      for (std::size_t i = 0; i < main.size(); ++i) {
        visit_float(GetParam(), "a weight", [&](auto tag) {
          ASSERT_EQ(value[i], static_cast<float>(decltype(tag)(main[i]))) << p->name() << " " << i;
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Groups, ::testing::Values(DType::f32, DType::bf16, DType::f16));

TEST(Groups, ValuesMayChangeBetweenUpdates) {
  for (const OptimizerConfig& config : kConfigs) {
    std::vector<ParamGroup> groups = three_groups(config);
    Trainer trainer(config, groups);
    Reference reference(trainer, config);
    for (int step = 0; step < 6; ++step) {
      if (step == 2) {
        if (config.name == OptimizerName::sgd) {
          groups[1].momentum = 0.95;
        } else {
          groups[1] = {.beta1 = 0.7, .beta2 = 0.9, .eps = 1e-3};
        }
        trainer.optimizer->set_group(1, groups[1]);
        EXPECT_EQ(trainer.optimizer->groups()[1].beta1, groups[1].beta1);
      }
      trainer.update(step, rates_of(step));
      reference.step(trainer, step, groups, rates_of(step));
    }
    reference.expect(trainer);
  }
}

TEST(Groups, FactorsMultiplyTheRatesOfAllGroups) {
  Trainer factors({}, {{}, {.lr_factor = 0.25, .decay_factor = 3}, {.lr_factor = 2, .decay_factor = 0}});
  Trainer rates({}, {{}, {}, {}});
  for (int step = 0; step < 3; ++step) {
    factors.write(step);
    factors.optimizer->step(0.0625, 0.125);
    rates.update(step, {{0.0625, 0.125}, {0.015625, 0.375}, {0.125, 0.0}});
  }
  EXPECT_EQ(factors.weights(), rates.weights());
  EXPECT_TRUE(factors.optimizer->decays(factors.b));
  EXPECT_FALSE(factors.optimizer->decays(factors.c));
  EXPECT_EQ(factors.optimizer->group_of(factors.e), 1u);
}

TEST(Groups, WithoutAnyVectorsAreNotDecayed) {
  const ExecCtx ctx = test::context(1, 3);
  Parameter matrix("m", {3, 4}, Init::ones()), vector("v", {3}, Init::ones()),
      named("n", {2, 2}, Init::ones());
  ParamStore store(ctx, {&matrix, &vector, &named});
  const Optimizer optimizer(ctx, store, {.no_decay = {"n*"}});
  ASSERT_EQ(optimizer.groups().size(), 2u);
  EXPECT_EQ(optimizer.group_of(matrix), 0u);
  EXPECT_EQ(optimizer.group_of(vector), 1u);
  EXPECT_EQ(optimizer.group_of(named), 1u);
}

TEST(Groups, AGlobThatMatchesNothingIsRefused) {
  const std::vector<std::string> names{"embedding.weight", "layers.0.qkv.weight", "layers.11.qkv.weight"};
  check_no_decay({}, names);
  check_no_decay({.no_decay = {"*.qkv.*", "layers.1?.*", "embedding.weight"}}, names);
  const auto refusal = [&](const std::vector<std::string>& globs) -> std::string {
    try {
      check_no_decay({.no_decay = globs}, names);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal({"*.qkv.*", "layers.*.qvk.weight"}),
            "optimizer.no_decay: \"layers.*.qvk.weight\" matches no parameter of the model; did you mean "
            "'layers.*.qkv.weight'?");
  EXPECT_EQ(refusal({"bias"}),
            "optimizer.no_decay: \"bias\" matches no parameter of the model; the nearest is "
            "'embedding.weight' (known: embedding.weight, layers.*.qkv.weight)");
}

TEST(Groups, AsManyAsThereMayBe) {
  // One parameter in each group, with a rate of its own; more groups than one launch hands over.
  const ExecCtx ctx = test::context(1, 3);
  std::vector<std::unique_ptr<Parameter>> owned;
  std::vector<Parameter*> parameters;
  for (int i = 0; i < kMostGroups; ++i) {
    owned.push_back(std::make_unique<Parameter>(std::to_string(i), Shape{3}, Init::ones()));
    parameters.push_back(owned.back().get());
  }
  const auto number = [](const Parameter& p) { return static_cast<std::size_t>(std::stoi(p.name())); };
  ParamStore store(ctx, parameters);
  Optimizer optimizer(ctx, store, {.name = OptimizerName::sgd, .momentum = 0, .clip_grad = 0}, {},
                      {std::vector<ParamGroup>(kMostGroups), number});
  for (Parameter* p : parameters) {
    p->next_beta();
    test::edit(p->grad(), [](auto& grad) { grad.assign(grad.size(), 1.0f); });
  }
  store.gradient().finish_call();
  optimizer.launch_step([](std::int64_t) {
    std::vector<UpdateRates> rates;
    for (int i = 0; i < kMostGroups; ++i) rates.push_back({i / 1024.0, 0});
    return rates;
  });
  optimizer.finish_step();
  for (int i = 0; i < kMostGroups; ++i) {
    const float want = 1.0f - static_cast<float>(i) / 1024.0f;
    EXPECT_EQ(parameters[static_cast<std::size_t>(i)]->value().to_floats(), std::vector<float>(3, want)) << i;
  }
  EXPECT_THROW(Optimizer(ctx, store, {}, {}, {std::vector<ParamGroup>(kMostGroups + 1), number}),
               InvalidArgument);
}

TEST(Groups, LaunchedAheadOfResultsThatTurnOutToBeSkipped) {
  const float inf = std::numeric_limits<float>::infinity();
  const float factors[] = {1, inf, 0.5f, inf, inf, -1, 2};
  Trainer waits({}, three_groups({})), ahead({}, three_groups({}));
  int results = 0;
  for (int step = 0; step < 7; ++step) {
    for (Trainer* trainer : {&waits, &ahead}) {
      trainer->write(step, factors[step]);
      trainer->optimizer->launch_step(
          [](std::int64_t updates) { return rates_of(static_cast<int>(updates)); });
    }
    waits.optimizer->finish_step();
    if (results + 3 == step + 1) ahead.optimizer->finish_step(), ++results;
  }
  for (; results < 7; ++results) ahead.optimizer->finish_step();
  EXPECT_EQ(ahead.optimizer->updates(), 4);
  EXPECT_EQ(waits.weights(), ahead.weights());
}

std::vector<ParamGroup> middle_frozen() { return {{}, {.frozen = true}, {.beta1 = 0.5}}; }

TEST(Frozen, KeepsItsValuesAndCountsInNoNorm) {
  for (const bool store_knows : {true, false}) {
    for (const DType compute : {DType::f32, DType::bf16}) {
      const OptimizerConfig config{.eps = 1e-5, .clip_grad = 1.0};
      Trainer trainer(config, middle_frozen(), compute, store_knows);
      const auto before = trainer.weights();
      const auto value = trainer.b.value().to_floats();
      EXPECT_EQ(trainer.b.trained(), !store_knows);
      EXPECT_EQ(trainer.store->frozen(trainer.b), store_knows);
      EXPECT_FALSE(trainer.optimizer->decays(trainer.b));
      EXPECT_TRUE(trainer.optimizer->decays(trainer.a));
      for (int step = 0; step < 3; ++step) {
        double squares = 0;
        for (const std::size_t k : {0, 2, 3}) {
          const auto n = static_cast<std::size_t>(trainer.store->parameters()[k]->shape().numel());
          for (std::size_t i = 0; i < n; ++i)
            squares += std::pow(static_cast<double>(gradient(k, step, i)), 2);
        }
        const StepResult result = trainer.update(step, rates_of(step));
        EXPECT_NEAR(result.grad_norm, std::sqrt(squares), 1e-9);
        EXPECT_NEAR(result.clip_factor, 1 / std::sqrt(squares), 1e-6);
      }
      const auto after = trainer.weights();
      for (const char* name : {"1.b", "1.e"}) EXPECT_EQ(after.at(name), before.at(name));
      for (const char* name : {"0.a", "2.c", "0.d"}) EXPECT_NE(after.at(name), before.at(name));
      EXPECT_EQ(trainer.b.value().to_floats(), value);
      for (const NamedTensor& state : trainer.optimizer->state()) {
        const bool zero = state.tensor.to_floats() == std::vector<float>(state.tensor.numel(), 0.0f);
        EXPECT_EQ(zero, state.parameter->name()[0] == '1') << state.name;
      }
    }
  }
}

TEST(Frozen, AnInfiniteGradientOfItSkipsNothing) {
  Trainer trainer({}, middle_frozen(), DType::f32, false);
  trainer.write(0);
  trainer.store->gradient().discard();
  for (Parameter* p : trainer.store->parameters()) {
    p->next_beta();
    const bool frozen = p->name()[0] == '1';
    test::edit(p->grad(), [&](auto& grad) { grad.assign(grad.size(), frozen ? INFINITY : 0.5f); });
  }
  trainer.store->gradient().finish_call();
  EXPECT_FALSE(trainer.optimizer->step(0.1, 0.1).skipped);
}

TEST(Frozen, AllOfThem) {
  Trainer trainer({}, {{.frozen = true}, {.frozen = true}, {.frozen = true}});
  const auto before = trainer.weights();
  const StepResult result = trainer.update(0, rates_of(1));
  EXPECT_EQ(result.grad_norm, 0.0);
  EXPECT_EQ(trainer.weights(), before);
}

/// y = (x w1 + b1) w2: its gradients on a tape.
TEST(Frozen, BackwardComputesTheOtherGradientsOnly) {
  struct Net {
    explicit Net(bool freeze)
        : store(ctx, {&w1, &b1, &w2},
                {.frozen = [freeze](const Parameter& p) { return freeze && p.name() != "b1"; }}) {}
    void backward() {
      Tape tape;
      tape.on_gradient_ready([this](Parameter& p) { store.gradient().ready(p); });
      store.gradient().begin_call([](const Parameter&) { return 1; });
      const Var x = tape.input(Tensor::from(ctx, std::vector<float>{1, 2, 3, -1, 0.5f, 2}, {2, 1, 3}), false);
      const Var y = linear(ctx, linear(ctx, x, w1, &b1), w2, nullptr);
      tape.backward(ctx, y, Tensor::from(ctx, std::vector<float>{1, -2, 3, 0.5f}, {2, 1, 2}));
      store.gradient().finish_call();
    }
    ExecCtx ctx = test::context(1, 3);
    Parameter w1{"w1", {4, 3}, Init::normal(1)}, b1{"b1", {4}, Init::zeros()},
        w2{"w2", {2, 4}, Init::normal(1)};
    ParamStore store;
  };
  Net all(false), bias(true);
  all.backward();
  bias.backward();
  EXPECT_FALSE(bias.w1.trained());
  EXPECT_EQ(bias.b1.grad().to_floats(), all.b1.grad().to_floats());
  EXPECT_NE(bias.b1.grad().to_floats(), std::vector<float>(4, 0.0f));
  EXPECT_EQ(bias.store.gradient().whole(bias.w2).to_floats(), std::vector<float>(8, 0.0f));
  EXPECT_EQ(bias.store.gradient().whole(bias.w1).to_floats(), std::vector<float>(12, 0.0f));
}

TEST(Groups, RefusesWhatNoUpdateCanUse) {
  const auto make = [](const OptimizerConfig& config, const ParamGroup& group) {
    Trainer(config, {{}, group, {}});
  };
  const OptimizerConfig sgd{.name = OptimizerName::sgd};
  EXPECT_THROW(make({}, {.beta1 = 1.0}), ConfigError);
  EXPECT_THROW(make({}, {.beta2 = -0.1}), ConfigError);
  EXPECT_THROW(make({}, {.eps = 0.0}), ConfigError);
  EXPECT_THROW(make({}, {.lr_factor = INFINITY}), ConfigError);
  EXPECT_THROW(make({}, {.momentum = 0.9}), ConfigError);
  EXPECT_THROW(make(sgd, {.momentum = 1.0}), ConfigError);
  EXPECT_THROW(make(sgd, {.beta1 = 0.9}), ConfigError);
  EXPECT_THROW(make({.name = OptimizerName::sgd, .nesterov = true}, {.momentum = 0.0}), ConfigError);
  EXPECT_THROW(Trainer({}, {{}, {}}), InvalidArgument);  // a parameter says group 2
  const ExecCtx ctx = test::context(1);
  Parameter p("p", {2}, Init::ones());
  ParamStore store(ctx, {&p});
  EXPECT_THROW(Optimizer(ctx, store, {}, {}, {{{}}, nullptr}), InvalidArgument);

  Trainer trainer({}, middle_frozen());
  trainer.write(0);
  const auto step = [&](const std::vector<UpdateRates>& rates) {
    trainer.optimizer->launch_step([&](std::int64_t) { return rates; });
  };
  EXPECT_THROW(step({{0.1, 0.1}, {0.1, 0.1}}), InvalidArgument);
  EXPECT_THROW(step({{0.1, 0.1}, {0.1, 0.1}, {INFINITY, 0.1}}), InvalidArgument);
  Optimizer& optimizer = *trainer.optimizer;
  EXPECT_THROW(optimizer.set_group(3, {}), InvalidArgument);
  EXPECT_THROW(optimizer.set_group(0, {.frozen = true}), InvalidArgument);
  EXPECT_THROW(optimizer.set_group(1, {}), InvalidArgument);
  EXPECT_THROW(optimizer.set_group(0, {.beta1 = 2.0}), ConfigError);
  EXPECT_THROW(optimizer.group_of(p), InvalidArgument);
  Trainer plain({.name = OptimizerName::sgd, .momentum = 0}, {{}, {}, {}});
  EXPECT_THROW(plain.optimizer->set_group(0, {.momentum = 0.9}), ConfigError);
}

/// The norm that grad_norm() gives is the one the next update finds, whatever happens to calls in between.
TEST(GradNorm, FollowsThePendingGradient) {
  Trainer trainer({.clip_grad = 0.1}, {{}, {}, {}});
  ParamStore& store = *trainer.store;
  Optimizer& optimizer = *trainer.optimizer;
  const auto call = [&](int step, const std::function<void()>& then) {
    store.gradient().begin_call();
    trainer.fill(step);
    store.gradient().close_call();
    then();
  };
  const auto norm_of = [](int first, double a, int second, double b) {
    const std::size_t sizes[] = {13 * 21, 7, 64, 5, 65 * 3};
    double squares = 0;
    for (std::size_t k = 0; k < 5; ++k) {
      for (std::size_t i = 0; i < sizes[k]; ++i) {
        const double g =
            a * static_cast<double>(gradient(k, first, i)) + b * static_cast<double>(gradient(k, second, i));
        squares += g * g;
      }
    }
    return std::sqrt(squares);
  };
  const auto expect = [&](double expected) {
    EXPECT_NEAR(optimizer.grad_norm(), expected, 1e-5 * expected);
    EXPECT_NEAR(optimizer.grad_norm(), expected, 1e-5 * expected);
  };
  const auto update = [&] { return optimizer.step(0.01, 0.0).grad_norm; };
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE(round);
    call(1, [&] { store.gradient().add_call(0.5); });
    expect(norm_of(1, 0.5, 0, 0));
    const double before = optimizer.grad_norm();
    EXPECT_EQ(update(), before);

    call(2, [&] { store.gradient().add_call(0.25); });
    expect(norm_of(2, 0.25, 0, 0));
    call(3, [&] {
      store.gradient().drop_call();
    });  // the gradient is the same, but lies elsewhere, times the factor
    EXPECT_NEAR(update(), norm_of(2, 0.25, 0, 0), 1e-5);

    call(2, [&] { store.gradient().add_call(0.25); });
    expect(norm_of(2, 0.25, 0, 0));
    call(3, [&] { store.gradient().add_call(-2); });
    EXPECT_NEAR(update(), norm_of(2, 0.25, 3, -2), 1e-4);

    call(4, [&] { store.gradient().add_call(1); });
    expect(norm_of(4, 1, 0, 0));
    EXPECT_EQ(optimizer.update_state().squares, 0.0);
    optimizer.set_update_state(optimizer.update_state());
    EXPECT_NEAR(update(), norm_of(4, 1, 0, 0), 1e-4);

    call(5, [&] { store.gradient().add_call(1); });
    expect(norm_of(5, 1, 0, 0));
    store.gradient().discard();
    call(6, [&] { store.gradient().add_call(1); });
    expect(norm_of(6, 1, 0, 0));
    EXPECT_NEAR(update(), norm_of(6, 1, 0, 0), 1e-4);
  }
}

/// Each parameter goes where it goes if all of them are updated by its group's rule.
TEST(Groups, EachMayHaveARuleOfItsOwn) {
  const std::vector<UpdateRates> rates(3, {.lr = 0.05, .weight_decay = 0.1});
  const auto trained = [&](const std::vector<ParamGroup>& groups) {
    Trainer trainer({.name = OptimizerName::adamw}, groups);
    for (int step = 0; step < 4; ++step) trainer.update(step, rates);
    return trainer.weights();
  };
  const ParamGroup adam{.rule = OptimizerName::adam}, sgd{.momentum = 0.5, .rule = OptimizerName::sgd};
  const auto mixed = trained({adam, sgd, {}}), by_adam = trained({adam, adam, adam}),
             by_sgd = trained({sgd, sgd, sgd}), by_adamw = trained({{}, {}, {}});
  for (const auto& [name, values] : mixed) {
    const auto& expected = name[0] == '0' ? by_adam : name[0] == '1' ? by_sgd : by_adamw;
    EXPECT_EQ(values, expected.at(name)) << name;
    EXPECT_NE(values, (name[0] == '2' ? by_adam : by_adamw).at(name)) << name;
  }
}

TEST(Groups, ARuleStaysWhatItWas) {
  Trainer trainer({.name = OptimizerName::adamw}, {{}, {.momentum = 0.5, .rule = OptimizerName::sgd}, {}});
  EXPECT_THROW(trainer.optimizer->set_group(0, {.rule = OptimizerName::sgd}), InvalidArgument);
  EXPECT_THROW(trainer.optimizer->set_group(1, {.momentum = 0.5}), InvalidArgument);
  trainer.optimizer->set_group(1, {.momentum = 0.9, .rule = OptimizerName::sgd});
  std::set<std::string> kinds;
  for (const StatePiece& piece : trainer.optimizer->pieces(PieceSet::owned)) kinds.insert(piece.kind);
  EXPECT_EQ(kinds, (std::set<std::string>{"adam_m", "adam_v", "momentum"}));
}

}  // namespace
}  // namespace tessera
