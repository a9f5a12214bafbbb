/// The lease of a run's folder: who may hold it, and that nobody publishes without it.

#include "tessera/engine/run_lock.hpp"

#include <sched.h>
#include <sys/wait.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <thread>

#include "engine/run_holder.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/engine/trainer.hpp"
#include "tests/engine/engine_support.hpp"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using test::expect_error;
using test::slurp;
using test::spill;

/// A hundredth of the real ones and less: 3 renewals are 600 ms.
constexpr RunLockTimes kShort{.renewal = 200ms, .silence = 600ms, .look = 20ms, .settle = 5ms};

/// A busy machine must not make a living holder look dead.
constexpr RunLockTimes kPatient{.renewal = 200ms, .silence = 60s, .look = 20ms, .settle = 5ms};

RunHolder elsewhere() {
  RunHolder holder = RunHolder::self();
  holder.host = "node-b";
  holder.boot = "another machine's";
  holder.generation = 4;
  return holder;
}

struct RunLocks : test::FolderTest {
  std::filesystem::path path() const { return dir_ / kRunLockName; }
  std::optional<RunHolder> holder() const { return RunHolder::parse(slurp(path())); }

  std::string told;
  Logger log = [this] {
    LogOptions options;
    options.console = false;
    options.callback = [this](LogLevel, std::string_view line) { told += std::string(line) + "\n"; };
    return Logger(options);
  }();
};

TEST_F(RunLocks, EachHolderIsOfTheNextGeneration) {
  for (int generation = 1; generation <= 3; ++generation) {
    {
      const RunLock lock(dir_, log, kShort);
      EXPECT_EQ(lock.generation(), generation);
      EXPECT_FALSE(holder()->released);
      EXPECT_TRUE(holder()->is_within_sight() && holder()->lives());
    }
    EXPECT_TRUE(holder()->released);
  }
  EXPECT_EQ(told, "");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir_), {}), 1);
}

TEST_F(RunLocks, ASecondJobIsRefused) {
  RunLock first(dir_, log, kShort);
  const std::string process = detail::concat("process ", ::getpid(), " on ");
  expect_error<ConfigError>([&] { RunLock(dir_, log, kShort); }, "is in use", process);
  expect_error<ConfigError>([&] { RunLock::refuse_if_held(dir_); }, "is in use", process);
  first.check_still_ours();
}

TEST_F(RunLocks, AProcessOfThisMachineThatIsGoneIsFollowedAtOnce) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  RunHolder dead = RunHolder::self();
  dead.pid = child;
  dead.generation = 7;
  spill(path(), dead.text(3));
  const auto begin = std::chrono::steady_clock::now();
  const RunLock lock(dir_, log, kPatient);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
  EXPECT_EQ(lock.generation(), 8);
  EXPECT_NE(told.find("is gone"), std::string::npos) << told;
}

/// No clock of the other machine counts, only whether its number grows while we look.
TEST_F(RunLocks, AnotherMachinesHolderIsWatchedForThreeRenewals) {
  for (const char* since : {"1970-01-01T00:00:00Z", "2999-01-01T00:00:00Z"}) {
    RunHolder other = elsewhere();
    other.since = since;
    spill(path(), other.text(100));
    int looks = 0;
    const auto begin = std::chrono::steady_clock::now();
    const RunLock lock(dir_, log, kShort, [&] { ++looks; });
    EXPECT_GE(std::chrono::steady_clock::now() - begin, kShort.silence);
    EXPECT_EQ(lock.generation(), 5);
    EXPECT_GE(looks, 3);
    EXPECT_NE(told.find("waiting up to 0 s to see whether it still runs"), std::string::npos) << told;
  }
}

TEST_F(RunLocks, TwoLeasesAreWatchedAtOnce) {
  spill(path(), elsewhere().text(100));
  RunLock::Sighting seen = RunLock::sight(dir_);
  seen.time -= kPatient.silence;
  int looks = 0;
  {
    const RunLock lock(
        dir_, log, kPatient, [&] { ++looks; }, seen);
    EXPECT_EQ(lock.generation(), 5);
  }
  EXPECT_EQ(looks, 0);
  // One that has counted since is watched from the beginning.
  const RunHolder other = elsewhere();
  spill(path(), other.text(101));
  expect_error<ConfigError>(
      [&] {
        RunLock(
            dir_, log, kPatient, [&] { spill(path(), other.text(102)); }, seen);
      },
      "is in use");
}

TEST_F(RunLocks, AnotherMachinesHolderThatCountsIsNot) {
  const RunHolder other = elsewhere();
  spill(path(), other.text(0));
  int looks = 0;
  expect_error<ConfigError>(
      [&] {
        RunLock(dir_, log, kPatient, [&] {
          if (++looks == 2) spill(path(), other.text(1));
        });
      },
      "is in use", "on node-b");
  EXPECT_EQ(holder()->token, other.token);
}

TEST_F(RunLocks, AnotherMachinesHolderThatGivesItBackIsFollowedAtOnce) {
  RunHolder other = elsewhere();
  spill(path(), other.text(0));
  int looks = 0;
  const RunLock lock(dir_, log, kPatient, [&] {
    other.released = true;
    if (++looks == 2) spill(path(), other.text(1));
  });
  EXPECT_EQ(lock.generation(), 5);
  EXPECT_LE(looks, 30);
}

TEST_F(RunLocks, WhoeverLostItPublishesNothingAndLeavesTheNewOneAlone) {
  std::string text;
  {
    RunLock first(dir_, log, kShort);
    first.check_still_ours();
    first.refuse_if_seen_lost();
    std::filesystem::remove(path());
    text = elsewhere().text(0);
    spill(path(), text);
    expect_error<ConfigError>([&] { first.check_still_ours(); }, "this job's no more", "on node-b",
                              "Nothing is written any more");
    expect_error<ConfigError>([&] { first.refuse_if_seen_lost(); }, "on node-b");
  }
  EXPECT_EQ(slurp(path()), text);
}

TEST_F(RunLocks, TheLossIsSeenWithoutAsking) {
  RunLock first(dir_, log, kShort);
  std::filesystem::remove(path());
  spill(path(), elsewhere().text(0));
  bool seen = false;
  for (int i = 0; i < 1000 && !seen; ++i) {
    std::this_thread::sleep_for(10ms);
    try {
      first.refuse_if_seen_lost();
    } catch (const ConfigError&) {
      seen = true;
    }
  }
  EXPECT_TRUE(seen);
}

TEST_F(RunLocks, AFileThatSomebodyRemovedIsMadeAgainUnlessOthersMayHaveComeAndGone) {
  RunLock first(dir_, log, kPatient);
  std::filesystem::remove(path());
  first.check_still_ours();
  ASSERT_TRUE(holder());
  EXPECT_EQ(holder()->generation, 1);

  RunLockTimes idle = kShort;
  idle.renewal = 60s;  // as if this process were stopped
  std::filesystem::create_directories(dir_ / "other");
  RunLock second(dir_ / "other", log, idle);
  std::filesystem::remove(dir_ / "other" / kRunLockName);
  std::this_thread::sleep_for(700ms);
  expect_error<ConfigError>([&] { second.check_still_ours(); }, "this job's no more", "was removed");
  EXPECT_FALSE(std::filesystem::exists(dir_ / "other" / kRunLockName));
}

/// A job in namespaces of its own, as a container or another machine is: stopped, taken for gone, continued.
TEST_F(RunLocks, AJobThatWasStoppedAndContinuedPublishesNothing) {
  int told_by_child[2];  // its process number here
  ASSERT_EQ(pipe(told_by_child), 0);
  const pid_t outer = fork();
  if (outer == 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWUTS) != 0) _exit(77);
    const pid_t inner = fork();  // the first process of its namespace
    if (inner > 0) {
      int status = 0;
      waitpid(inner, &status, 0);
      _exit(WEXITSTATUS(status));
    }
    RunLock lock(dir_, Logger::silent(), kShort);
    try {
      lock.check_still_ours();
      spill(dir_ / "published", "before");
      const pid_t self = std::stoi(std::filesystem::read_symlink("/proc/self").string());
      if (write(told_by_child[1], &self, sizeof self) != sizeof self) _exit(2);
      while (!std::filesystem::exists(dir_ / "go")) std::this_thread::sleep_for(20ms);
      lock.check_still_ours();
      spill(dir_ / "published", "after");
      _exit(0);
    } catch (const ConfigError& error) {
      spill(dir_ / "refused", error.what());
      _exit(42);
    }
  }
  pid_t inner = 0;
  ::close(told_by_child[1]);
  if (read(told_by_child[0], &inner, sizeof inner) != sizeof inner) {
    int status = 0;
    waitpid(outer, &status, 0);
    ::close(told_by_child[0]);
    if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this machine allows no namespaces";
    FAIL() << "the job ended with " << WEXITSTATUS(status);
  }
  ::close(told_by_child[0]);
  expect_error<ConfigError>([&] { RunLock(dir_, log, kPatient); }, "is in use");  // it counts

  kill(inner, SIGSTOP);
  const RunLock lock(dir_, log, kShort);
  EXPECT_EQ(lock.generation(), 2);
  const std::string text = slurp(path());
  spill(dir_ / "go", "");
  kill(inner, SIGCONT);
  int status = 0;
  waitpid(outer, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 42);
  EXPECT_EQ(slurp(dir_ / "published"), "before");
  EXPECT_NE(slurp(dir_ / "refused").find("this job's no more"), std::string::npos);
  EXPECT_EQ(holder()->token, RunHolder::parse(text)->token);
}

/// The run itself: a checkpoint that is due after the loss does not appear, and nothing else is touched.
TEST_F(RunLocks, ARunThatLostItsFolderEndsWithoutACheckpoint) {
  Config config = run_config("run");
  config.training.steps = 9;
  config.checkpoint.every = 3;
  const auto checkpoints = dir_ / "run/checkpoints";
  for (const auto& folder : {dir_ / "run", checkpoints}) {
    std::filesystem::remove_all(dir_ / "run");
    const std::string other = elsewhere().text(0);
    TrainHooks hooks;
    hooks.on_step = [&](const StepRecord& record) {
      if (record.step != 5) return;
      std::filesystem::remove(folder / kRunLockName);
      spill(folder / kRunLockName, other);
    };
    expect_error<ConfigError>([&] { train(config, hooks, Logger::silent()); }, "this job's no more",
                              "on node-b");
    EXPECT_EQ(list_checkpoints(checkpoints), std::vector<std::int64_t>{3});
    EXPECT_EQ(slurp(checkpoints / "latest"), "step-00000003\n");
    EXPECT_EQ(slurp(folder / kRunLockName), other);
    EXPECT_FALSE(std::filesystem::exists(checkpoints / ".incomplete-step-00000006"));
  }
}

}  // namespace
}  // namespace tessera
