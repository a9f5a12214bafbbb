/// Runs that are asked to stop, and those that are started again after a failure.

#include <thread>

#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_error;

/// One rank's part of a run: which steps it made, how it ended.
struct Part {
  std::vector<std::int64_t> steps;
  std::vector<double> losses;
  std::vector<std::int64_t> saved;
  TrainResult result;
};

struct Orders {
  std::int64_t interrupt_after = 0, preempt_after = 0;  ///< steps; 0 = never
  std::int64_t fail_after = 0;                          ///< dies as a process does that is killed
  bool restarted = false;
};

struct Killed : std::exception {};

Part train_one(const Config& config, const Orders& orders, std::shared_ptr<Communicator> world = nullptr) {
  Part part;
  TrainHooks hooks;
  hooks.on_step = [&](const StepRecord& record) { part.losses.push_back(record.loss); };
  hooks.on_progress = [&](std::int64_t step) {
    part.steps.push_back(step);
    if (orders.fail_after > 0 && step >= orders.fail_after) throw Killed();
  };
  hooks.on_saved = [&](std::int64_t step, double seconds) {
    EXPECT_GT(seconds, 0);
    part.saved.push_back(step);
  };
  const auto reached = [&](std::int64_t step) { return step > 0 && part.steps.back() >= step; };
  hooks.should_stop = [&] { return reached(orders.interrupt_after); };
  hooks.should_preempt = [&] { return reached(orders.preempt_after); };
  try {
    part.result = train(config, hooks, Logger::silent(), std::move(world), {.restarted = orders.restarted});
  } catch (const Killed&) {
    part.result.step = -1;
  }
  return part;
}

/// Ranks as threads; element r follows orders[r].
std::vector<Part> train_all(const Config& config, const std::vector<Orders>& orders) {
  const auto ranks = make_local_communicators(static_cast<int>(orders.size()));
  std::vector<Part> parts(orders.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < orders.size(); ++r)
    threads.emplace_back([&, r] { parts[r] = train_one(config, orders[r], ranks[r]); });
  for (std::thread& thread : threads) thread.join();
  return parts;
}

using Steps = std::vector<std::int64_t>;

struct Stops : test::FolderTest {
  Config config(const std::string& name, std::int64_t every = 0) {
    Config c = run_config(name);
    c.training.steps = 8;
    c.checkpoint.every = every;
    c.checkpoint.keep = 9;
    return c;
  }
  /// On a GPU the next step runs already when a result is known.
  const std::int64_t ahead_ = test::on_cuda() ? 1 : 0;
};

TEST_F(Stops, APreemptedRunSavesWhateverIsConfiguredAndGoesOn) {
  const Config c = config("run");
  const Part whole = train_one(config("whole"), {});
  const Part first = train_one(c, {.preempt_after = 3});
  EXPECT_TRUE(first.result.preempted && first.result.interrupted);
  EXPECT_EQ(first.saved, Steps{3 + ahead_});
  const Part second = train_one(c, {});
  EXPECT_FALSE(second.result.interrupted);
  EXPECT_EQ(second.steps.front(), 4 + ahead_);
  EXPECT_EQ(second.losses.back(), whole.losses.back());
}

TEST_F(Stops, AnInterruptedRunSavesOnlyIfAsked) {
  Config c = config("run");
  const Part first = train_one(c, {.interrupt_after = 3});
  EXPECT_TRUE(first.result.interrupted);
  EXPECT_FALSE(first.result.preempted);
  EXPECT_TRUE(first.saved.empty());
}

TEST_F(Stops, OneRankThatIsAskedStopsAllAfterTheSameStep) {
  if (test::on_cuda()) GTEST_SKIP() << "ranks as threads of one GPU";
  Config c = config("run");
  c.parallel.data = 2;
  for (std::size_t asked = 0; asked < 2; ++asked) {
    std::vector<Orders> orders(2);
    orders[asked].preempt_after = 2 + static_cast<std::int64_t>(asked) * 2;
    const auto parts = train_all(c, orders);
    for (const Part& part : parts) {
      EXPECT_TRUE(part.result.preempted);
      EXPECT_EQ(part.saved, Steps{orders[asked].preempt_after});
      EXPECT_EQ(part.steps, parts[0].steps);
    }
  }
  // Interrupted here, preempted there: who wants to save is heard.
  const auto parts = train_all(c, {{.interrupt_after = 6}, {.preempt_after = 6}});
  for (const Part& part : parts) EXPECT_EQ(part.saved, Steps{6});
}

TEST_F(Stops, ARestartedRunGoesOnFromItsOwnCheckpoint) {
  const Config whole = config("whole", 2);
  const Part straight = train_one(whole, {});
  Config none = config("none", 2);
  none.checkpoint.resume = "none";
  train_one(none, {.fail_after = 5});
  expect_error<ConfigError>([&] { train_one(none, {}); }, "resume=none");  // a second first start
  const Part again = train_one(none, {.restarted = true});
  EXPECT_EQ(again.steps.front(), 5);
  EXPECT_EQ(again.losses.back(), straight.losses.back());

  Config branch = config("branch", 2);
  branch.checkpoint.resume = (dir_ / "whole/checkpoints/step-00000002").string();
  train_one(branch, {.fail_after = 3});
  // Nothing of its own yet: it begins where it did the first time.
  EXPECT_EQ(train_one(branch, {.fail_after = 7, .restarted = true}).steps.front(), 3);
  EXPECT_EQ(train_one(branch, {.restarted = true}).steps, (Steps{7, 8}));
}

/// The path names the newest checkpoint of the run's own folder; after more steps it no longer does.
TEST_F(Stops, ARestartedRunThatWentOnFromOneOfItsOwnGoesOn) {
  Config c = config("run", 2);
  train_one(c, {.fail_after = 3});
  c.checkpoint.resume = (dir_ / "run/checkpoints/step-00000002").string();
  train_one(c, {.fail_after = 5});
  expect_error<ConfigError>([&] { train_one(c, {}); }, "newer than");
  EXPECT_EQ(train_one(c, {.restarted = true}).steps, (Steps{5, 6, 7, 8}));
}

TEST_F(Stops, ARestartBeforeTheFirstCheckpointBeginsAnew) {
  Config c = config("run", 5);
  c.checkpoint.resume = "none";
  train_one(c, {.fail_after = 2});
  EXPECT_EQ(train_one(c, {.restarted = true}).steps.front(), 1);
}

}  // namespace
}  // namespace tessera
