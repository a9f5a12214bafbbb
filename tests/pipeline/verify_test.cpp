#include <gtest/gtest.h>

#include <algorithm>

#include "support.hpp"
#include "tessera/base/error.hpp"

namespace tessera::test {
namespace {

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

testing::AssertionResult is_found(const Schedule& schedule, const std::string& words) {
  const std::string faults = joined(verify(schedule));
  if (faults.find(words) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "no '" << words << "' among the faults:\n" << faults;
}

std::size_t find(const std::vector<Action>& column, const Action& action) {
  const auto found = std::find(column.begin(), column.end(), action);
  EXPECT_NE(found, column.end());
  return static_cast<std::size_t>(found - column.begin());
}

TEST(Verify, GeneratedTablesAreSound) {
  int count = 0;
  for_all_schedules(8, 3, 16, [&](const Schedule& schedule) {
    ++count;
    EXPECT_EQ(joined(verify(schedule)), "") << describe(schedule);
  });
  // p x m: three kinds with one chunk and zb-v, each in training and evaluation; interleaved with two v: all
  // in evaluation, in training those with p | m.
  EXPECT_EQ(count, 4 * 2 * 8 * 16 + 2 * (8 * 16 + 16 + 8 + 5 + 4 + 3 + 2 + 2 + 2));
}

TEST(Verify, FindsEveryDrop) {
  for (const PipelineSchedule kind : kSchedules) {
    const int chunks = is_possible(kind, 2, 1, 4, false) ? 1 : 2;
    const Schedule sound = make_schedule(kind, 2, chunks, 4);
    for (std::size_t stage = 0; stage < 2; ++stage)
      for (std::size_t k = 0; k < sound.actions[stage].size(); ++k) {
        Schedule broken = sound;
        broken.actions[stage].erase(broken.actions[stage].begin() + static_cast<std::ptrdiff_t>(k));
        EXPECT_TRUE(is_found(broken, "nobody does")) << describe(sound) << " without pass " << k;
      }
  }
}

TEST(Verify, FindsEveryDuplicate) {
  for (const PipelineSchedule kind : kSchedules) {
    const int chunks = is_possible(kind, 2, 1, 4, false) ? 1 : 2;
    const Schedule sound = make_schedule(kind, 2, chunks, 4);
    for (std::size_t stage = 0; stage < 2; ++stage)
      for (std::size_t k = 0; k < sound.actions[stage].size(); ++k) {
        Schedule broken = sound;
        broken.actions[stage].push_back(sound.actions[stage][k]);
        EXPECT_TRUE(is_found(broken, "was done before")) << describe(sound) << " with pass " << k << " twice";
      }
  }
}

/// Any other pass in the place of one.
TEST(Verify, FindsEveryReplacement) {
  const Schedule sound = make_schedule(PipelineSchedule::zb_h1, 3, 1, 4);
  for (std::size_t stage = 0; stage < 3; ++stage)
    for (std::size_t k = 0; k < sound.actions[stage].size(); ++k)
      for (const Kind kind : {Kind::forward, Kind::backward, Kind::input_gradient, Kind::weight_gradient})
        for (int micro_batch = -1; micro_batch <= 4; ++micro_batch) {
          Schedule broken = sound;
          broken.actions[stage][k] = {kind, 0, micro_batch};
          if (!(broken.actions[stage][k] == sound.actions[stage][k])) {
            EXPECT_FALSE(verify(broken).empty());
          }
        }
}

TEST(Verify, FindsSwapsAgainstTheOrder) {
  Schedule schedule = make_schedule(PipelineSchedule::zb_h1, 2, 1, 4);
  auto& last = schedule.actions[1];
  std::swap(last[find(last, {Kind::forward, 0, 0})], last[find(last, {Kind::input_gradient, 0, 0})]);
  EXPECT_TRUE(is_found(schedule, "its F comes only later"));

  schedule = make_schedule(PipelineSchedule::zb_h1, 2, 1, 4);
  auto& first = schedule.actions[0];
  std::swap(first[find(first, {Kind::input_gradient, 0, 1})],
            first[find(first, {Kind::weight_gradient, 0, 1})]);
  EXPECT_TRUE(is_found(schedule, "its B comes only later"));
}

/// Every stage for itself is in order: F before B. Together they wait for each other.
TEST(Verify, FindsDeadlocks) {
  Schedule schedule = make_schedule(PipelineSchedule::one_f_one_b, 2, 1, 3);
  auto& first = schedule.actions[0];
  std::swap(first[find(first, {Kind::forward, 0, 1})], first[find(first, {Kind::backward, 0, 0})]);
  EXPECT_EQ(joined(verify(schedule)), "") << "F0 B0 F1 only waits longer";

  schedule.actions[1] = {{Kind::forward, 0, 0},  {Kind::forward, 0, 1}, {Kind::backward, 0, 0},
                         {Kind::backward, 0, 1}, {Kind::forward, 0, 2}, {Kind::backward, 0, 2}};
  EXPECT_TRUE(is_found(schedule, "deadlock: stage 0 at B0 (pass 2) waits for ever"));
  EXPECT_TRUE(is_found(schedule, "deadlock: stage 1 at F1 (pass 2) waits for ever"));
  EXPECT_THROW(simulate(schedule, {PassTimes{}}), InvalidArgument);
}

TEST(Verify, FindsMessagesThatCross) {
  Schedule schedule = make_schedule(PipelineSchedule::gpipe, 2, 1, 3);
  std::swap(schedule.actions[1][0], schedule.actions[1][1]);
  EXPECT_TRUE(is_found(schedule, "messages cross"));
}

TEST(Verify, FindsWhatIsNotInTheModel) {
  Schedule schedule = make_schedule(PipelineSchedule::one_f_one_b, 2, 1, 3);
  schedule.actions[0].push_back({Kind::forward, 1, 0});
  EXPECT_TRUE(is_found(schedule, "no such chunk"));
  schedule.actions.pop_back();
  EXPECT_TRUE(is_found(schedule, "1 columns for 2 stages"));

  schedule = make_schedule(PipelineSchedule::one_f_one_b, 2, 1, 3, true);
  schedule.actions[0].push_back({Kind::backward, 0, 0});
  EXPECT_TRUE(is_found(schedule, "a backward pass in a forward-only schedule"));

  // Two passes of a split backward and one of both.
  schedule = make_schedule(PipelineSchedule::zb_h1, 2, 1, 3);
  schedule.actions[0][find(schedule.actions[0], {Kind::input_gradient, 0, 0})].kind = Kind::backward;
  EXPECT_TRUE(is_found(schedule, "W was done before"));
}

}  // namespace
}  // namespace tessera::test
