/// Stages that take unequal times, by sleeping: the bubble that is measured is the one simulate() foretold.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

#include "chain_program.hpp"
#include "support.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {
namespace {

/// In milliseconds, per stage.
const std::vector<PassTimes> kTimes = {{8, 10, 6, 0}, {12, 14, 10, 0}, {10, 10, 8, 0}};

class SleepingProgram final : public ChainProgram {
 public:
  SleepingProgram(const ExecCtx& ctx, const Schedule& schedule, int stage)
      : ChainProgram(ctx, schedule, stage), times_(kTimes[static_cast<std::size_t>(stage)]) {}

 private:
  void on_pass(const Action& action) override {
    double ms = times_.forward;
    if (action.kind == Kind::backward) ms = times_.input_gradient + times_.weight_gradient;
    if (action.kind == Kind::input_gradient) ms = times_.input_gradient;
    if (action.kind == Kind::weight_gradient) ms = times_.weight_gradient;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
  }
  PassTimes times_;
};

double measure(const Schedule& schedule) {
  std::mutex mutex;
  double begin_s = 1e300, end_s = 0, busy_s = 0;
  run_local(schedule.stages, [&](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 7);
    SleepingProgram program(ctx, schedule, comm->rank());
    PipelineExecutor executor(ctx, *comm);
    comm->barrier(ctx);
    executor.run(schedule, program);
    const std::lock_guard lock(mutex);
    for (const ExecutedAction& executed : executor.executed()) {
      begin_s = std::min(begin_s, executed.begin_s);
      end_s = std::max(end_s, executed.end_s);
      busy_s += executed.end_s - executed.begin_s;
    }
  });
  return 1.0 - busy_s / (schedule.stages * (end_s - begin_s));
}

double median_of_three(const Schedule& schedule) {
  std::vector<double> bubbles = {measure(schedule), measure(schedule), measure(schedule)};
  std::sort(bubbles.begin(), bubbles.end());
  return bubbles[1];
}

class Bubble : public testing::TestWithParam<PipelineSchedule> {};

TEST_P(Bubble, IsTheOneForetold) {
  const Schedule schedule = make_schedule(GetParam(), 3, 1, 4);
  const double foretold = simulate(schedule, kTimes).bubble;
  double measured = median_of_three(schedule);
  for (int retry = 0; retry < 2 && std::abs(measured - foretold) > 0.1 * foretold; ++retry) {
    measured = median_of_three(schedule);
  }
  EXPECT_NEAR(measured, foretold, 0.1 * foretold);
  RecordProperty("foretold", std::to_string(foretold));
  RecordProperty("measured", std::to_string(measured));
}

INSTANTIATE_TEST_SUITE_P(Schedules, Bubble,
                         testing::Values(PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b,
                                         PipelineSchedule::zb_h1),
                         [](const auto& info) {
                           std::string name(name_of(info.param));
                           std::erase(name, '-');
                           return "of_" + name;
                         });

}  // namespace
}  // namespace tessera::test
