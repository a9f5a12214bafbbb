#include "tessera/optim/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

using Table = std::vector<std::pair<std::int64_t, double>>;

/// The scheduler of Megatron's own tests: init .01, max .1, min .001, W 100, D 1000.
constexpr double kLr = 0.1;
LrScheduleConfig megatron(LrStyle style) {
  return {.style = style, .warmup_steps = 100, .decay_steps = 1000, .min_lr = 0.001, .init_lr = 0.01};
}

void expect_lr(const LrScheduleConfig& config, const Table& table) {
  const LrSchedule schedule(config, kLr, 777);
  for (const auto& [n, lr] : table) EXPECT_NEAR(schedule.at(n), lr, 1e-12) << "n = " << n;
}

TEST(LrSchedule, MegatronsTable) {
  expect_lr(megatron(LrStyle::linear),
            {{50, 0.055}, {500, 0.1 - 0.099 * 400 / 900}, {1001, 0.001}, {5000, 0.001}});
}

TEST(LrSchedule, WarmUpIsTheSameForEveryStyle) {
  for (const auto style :
       {LrStyle::constant, LrStyle::linear, LrStyle::cosine, LrStyle::inverse_sqrt, LrStyle::wsd}) {
    auto config = megatron(style);
    config.wsd_decay_steps = 200;
    expect_lr(config, {{0, 0.01}, {1, 0.0109}, {50, 0.055}, {99, 0.0991}, {100, 0.1}});
  }
}

TEST(LrSchedule, Constant) {
  expect_lr(megatron(LrStyle::constant), {{101, 0.1}, {1000, 0.1}, {1001, 0.1}, {5000, 0.1}});
}

TEST(LrSchedule, Linear) {
  expect_lr(megatron(LrStyle::linear), {{101, 0.09989},
                                        {200, 0.089},
                                        {325, 0.07525},
                                        {750, 0.0285},
                                        {900, 0.012},
                                        {999, 0.00111},
                                        {1000, 0.001}});
}

TEST(LrSchedule, Cosine) {
  expect_lr(megatron(LrStyle::cosine), {{101, 0.0999996984291},
                                        {200, 0.0970147847289},
                                        {325, 0.0855017856687},
                                        {500, 0.0590955847945},
                                        {750, 0.0186820133205},
                                        {999, 0.00100030157094},
                                        {1000, 0.001},
                                        {1001, 0.001}});
}

TEST(LrSchedule, InverseSquareRoot) {
  expect_lr(megatron(LrStyle::inverse_sqrt), {{101, 0.099503719021},
                                              {200, 0.0707106781187},
                                              {500, 0.04472135955},
                                              {1000, 0.0316227766017},
                                              {1001, 0.001}});
  LrScheduleConfig floored{.style = LrStyle::inverse_sqrt, .decay_steps = 1000, .min_lr = 0.04};
  expect_lr(floored, {{0, 0.1}, {1, 0.1}, {2, 0.0707106781187}, {4, 0.05}, {6, 0.0408248290464}, {7, 0.04}});
}

TEST(LrSchedule, Wsd) {
  const std::vector<std::pair<WsdStyle, Table>> tables = {
      {WsdStyle::linear, {{801, 0.099505}, {850, 0.07525}, {900, 0.0505}, {999, 0.001495}}},
      {WsdStyle::cosine,
       {{801, 0.0999938933078}, {850, 0.0855017856687}, {900, 0.0505}, {999, 0.00100610669216}}},
      {WsdStyle::exponential,
       {{801, 0.0993149720399}, {850, 0.0684974902202}, {900, 0.0420071426749}, {999, 0.00134370310244}}},
      {WsdStyle::minus_sqrt,
       {{801, 0.0929996428663}, {850, 0.0505}, {900, 0.0299964286625}, {999, 0.00124781015086}}}};
  for (const auto& [style, table] : tables) {
    auto config = megatron(LrStyle::wsd);
    config.wsd_style = style;
    config.wsd_decay_steps = 200;
    expect_lr(config, table);
    expect_lr(config, {{101, 0.1}, {500, 0.1}, {800, 0.1}, {1000, 0.001}, {1001, 0.001}});
  }
}

TEST(LrSchedule, WithoutWarmUpStartsAtTheTop) {
  const LrSchedule schedule({.style = LrStyle::cosine, .decay_steps = 10}, 0.1, 99);
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.1);
  EXPECT_NEAR(schedule.at(3), 0.0793892626146, 1e-12);
  EXPECT_NEAR(schedule.at(5), 0.05, 1e-12);
  EXPECT_NEAR(schedule.at(10), 0.0, 1e-17);
}

TEST(LrSchedule, FirstUpdateOfAWarmUpFromZeroDoesNothing) {
  const LrSchedule schedule({.style = LrStyle::linear, .warmup_steps = 4, .decay_steps = 8}, 0.1, 8);
  EXPECT_EQ(schedule.at(0), 0.0);
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.025);
}

TEST(LrSchedule, MayWarmUpToTheVeryEnd) {
  const LrSchedule schedule({.style = LrStyle::cosine, .warmup_steps = 10, .decay_steps = 10, .min_lr = 0.01},
                            0.1, 10);
  EXPECT_DOUBLE_EQ(schedule.at(5), 0.05);
  EXPECT_DOUBLE_EQ(schedule.at(10), 0.1);
  EXPECT_DOUBLE_EQ(schedule.at(11), 0.01);
}

TEST(LrSchedule, DecaysOverTheTrainingUnlessToldOtherwise) {
  const LrSchedule schedule({.style = LrStyle::linear, .warmup_steps = 0}, 1.0, 40);
  EXPECT_DOUBLE_EQ(schedule.at(10), 0.75);
  EXPECT_DOUBLE_EQ(schedule.at(40), 0.0);
}

/// The message of the ConfigError that `make` throws.
template <typename Make>
std::string refusal(Make&& make) {
  try {
    make();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LrSchedule, RefusesWhatCannotBeFollowed) {
  const auto message = [](const LrScheduleConfig& config, double lr = 0.1) {
    return refusal([&] { LrSchedule(config, lr, 50); });
  };
  EXPECT_NE(message({.style = LrStyle::linear, .warmup_steps = 51}).find("warmup_steps (51)"),
            std::string::npos);
  EXPECT_NE(message({.min_lr = 0.2}).find("min_lr is 0.2"), std::string::npos);
  EXPECT_NE(message({.init_lr = 0.3}).find("init_lr is 0.3"), std::string::npos);
  EXPECT_NE(message({.style = LrStyle::wsd}).find("wsd_decay_steps is 0"), std::string::npos);
  EXPECT_NE(message({}, std::nan("")).find("optimizer.lr"), std::string::npos);
  EXPECT_EQ(message({.style = LrStyle::constant, .warmup_steps = 51}), "accepted");
  EXPECT_THROW(LrSchedule({}, 0.1, 50).at(-1), InvalidArgument);
}

TEST(WeightDecaySchedule, MegatronsTable) {
  LrScheduleConfig config{.weight_decay_style = WeightDecayStyle::linear, .end_weight_decay = 0.1};
  EXPECT_DOUBLE_EQ(WeightDecaySchedule(config, 0.0, 1000).at(500), 0.05);
  config.weight_decay_style = WeightDecayStyle::cosine;
  EXPECT_NEAR(WeightDecaySchedule(config, 0.0, 1000).at(500), 0.05 * (std::cos(std::acos(-1.0) / 2) + 1),
              1e-15);
  const WeightDecaySchedule constant({.weight_decay_style = WeightDecayStyle::constant}, 0.01, 1000);
  EXPECT_EQ(constant.at(0), 0.01);
  EXPECT_EQ(constant.at(100), 0.01);
  EXPECT_EQ(constant.at(5000), 0.01);
}

TEST(WeightDecaySchedule, RampsFromStartToEnd) {
  LrScheduleConfig config{.weight_decay_style = WeightDecayStyle::linear, .end_weight_decay = 0.1};
  const WeightDecaySchedule linear(config, 0.02, 1000);
  for (const auto& [n, wd] :
       Table{{0, 0.02}, {1, 0.02008}, {250, 0.04}, {999, 0.09992}, {1000, 0.1}, {1001, 0.1}}) {
    EXPECT_NEAR(linear.at(n), wd, 1e-13) << n;
  }
  config.weight_decay_style = WeightDecayStyle::cosine;
  const WeightDecaySchedule cosine(config, 0.02, 1000);
  for (const auto& [n, wd] :
       Table{{0, 0.02}, {1, 0.0200001973919}, {250, 0.0317157287525}, {999, 0.0999998026081}, {1001, 0.1}}) {
    EXPECT_NEAR(cosine.at(n), wd, 1e-13) << n;
  }
}

TEST(WeightDecaySchedule, RefusesAFallAndAConstantThatIsNone) {
  EXPECT_NE(refusal([] { WeightDecaySchedule({.end_weight_decay = 0.1}, 0.2, 10); }).find("must not fall"),
            std::string::npos);
  EXPECT_NE(refusal([] { WeightDecaySchedule({.end_weight_decay = 0.3}, 0.2, 10); }).find("is constant"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
