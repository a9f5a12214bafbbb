/// The rule of dynamic loss scaling, as literal sequences. They follow from DynamicGradScaler in Megatron's
/// megatron/core/optimizer/grad_scaler.py, worked out by hand: a step that overflows takes one from the
/// hysteresis, and from the one that leaves none on each of them halves the scale; `window` finite steps in a
/// row double it and alone fill the hysteresis again.

#include <gtest/gtest.h>

#include <cmath>

#include "tessera/base/update_state.hpp"

namespace tessera {
namespace {

UpdateState start(const LossScaleRule& rule, float scale) {
  UpdateState state;
  state.loss_scale = scale;
  state.hysteresis = rule.hysteresis;
  return state;
}

void step(const LossScaleRule& rule, UpdateState& state, bool overflow) {
  state.skip = overflow ? 1 : 0;
  rule.apply(state);
}

struct Step {
  bool overflow;
  float scale;  ///< and the two counters after the step
  int good_steps, hysteresis;
};

void expect_sequence(const LossScaleRule& rule, float scale, std::initializer_list<Step> steps) {
  UpdateState state = start(rule, scale);
  int number = 0;
  for (const Step& expected : steps) {
    SCOPED_TRACE(::testing::Message() << "step " << ++number);
    step(rule, state, expected.overflow);
    EXPECT_EQ(state.loss_scale, expected.scale);
    EXPECT_EQ(state.good_steps, expected.good_steps);
    EXPECT_EQ(state.hysteresis, expected.hysteresis);
  }
}

constexpr bool kOverflow = true, kFinite = false;

TEST(LossScale, FollowsMegatronStepByStep) {
  expect_sequence({.smallest = 2, .growth_interval = 3, .hysteresis = 2}, 16,
                  {{kFinite, 16, 1, 2},   {kFinite, 16, 2, 2},   {kFinite, 32, 0, 2},
                   {kOverflow, 32, 0, 1},                       // the first is tolerated,
                   {kFinite, 32, 1, 1},   {kFinite, 32, 2, 1},  // finite steps do not make up for it,
                   {kOverflow, 16, 0, 0},  // so the next one counts although it does not follow the first,
                   {kOverflow, 8, 0, -1},  // and all after it
                   {kFinite, 8, 1, -1},   {kOverflow, 4, 0, -2}, {kFinite, 4, 1, -2},
                   {kFinite, 4, 2, -2},   {kFinite, 8, 0, 2},  // until the scale has grown.
                   {kOverflow, 8, 0, 1},  {kOverflow, 4, 0, 0},  {kOverflow, 2, 0, -1},
                   {kOverflow, 2, 0, -2},  // the smallest
                   {kFinite, 2, 1, -2},   {kFinite, 2, 2, -2},   {kFinite, 4, 0, 2}});
}

TEST(LossScale, GrowsBeforeItShrinks) {
  expect_sequence({.smallest = 2, .growth_interval = 2, .hysteresis = 2}, 8,
                  {{kFinite, 8, 1, 2}, {kFinite, 16, 0, 2}, {kOverflow, 16, 0, 1}, {kOverflow, 8, 0, 0}});
}

TEST(LossScale, WithHysteresisOneEveryOverflowHalves) {
  expect_sequence({.growth_interval = 2, .hysteresis = 1}, 8,
                  {{kOverflow, 4, 0, 0}, {kOverflow, 2, 0, -1}, {kFinite, 2, 1, -1}, {kFinite, 4, 0, 1}});
}

TEST(LossScale, StopsAtASmallestThatIsNoPowerOfTwo) {
  expect_sequence({.smallest = 3, .growth_interval = 1, .hysteresis = 1}, 8,
                  {{kOverflow, 4, 0, 0}, {kOverflow, 3, 0, -1}, {kOverflow, 3, 0, -2}, {kFinite, 6, 0, 1}});
}

TEST(LossScale, DefaultsOfMegatron) {
  const LossScaleRule rule{.growth_interval = 1000};
  EXPECT_EQ(rule.growth, 2.0f);
  EXPECT_EQ(rule.backoff, 0.5f);
  EXPECT_EQ(rule.smallest, 1.0f);
  EXPECT_EQ(rule.hysteresis, 2);
  UpdateState state = start(rule, 0x1p32f);
  for (int overflows = 1; overflows <= 40; ++overflows) {
    step(rule, state, kOverflow);
    EXPECT_EQ(state.loss_scale, overflows < 33 ? std::ldexp(1.0f, 33 - overflows) : 1.0f) << overflows;
  }
  for (int good = 1; good <= 2000; ++good) {
    step(rule, state, kFinite);
    EXPECT_EQ(state.loss_scale, good < 1000 ? 1.0f : good < 2000 ? 2.0f : 4.0f) << good;
  }
  EXPECT_EQ(state.hysteresis, 2);
}

TEST(LossScale, WithoutAWindowNothingChanges) {
  const LossScaleRule constant{};
  UpdateState state = start(constant, 128);
  for (int i = 0; i < 100; ++i) step(constant, state, i % 3 == 0);
  EXPECT_EQ(state.loss_scale, 128.0f);
  EXPECT_EQ(state.good_steps, 0);
  EXPECT_EQ(state.hysteresis, 2);
}

}  // namespace
}  // namespace tessera
