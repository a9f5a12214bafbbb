/// What decides whether a job starts again: how far its workers came, how they ended.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "launch/failure.hpp"
#include "launch/progress.hpp"
#include "launch/restarts.hpp"
#include "tessera/base/exit_codes.hpp"
#include "tessera/launch/progress.hpp"

namespace tessera::launching {
namespace {

TEST(Progress, IsReadInAnyPieces) {
  ProgressReader reader;
  reader.add("step 1\nst", 10);
  EXPECT_EQ(reader.progress(), (Progress{.step = 1}));
  reader.add("ep 3\nstep 2\n", 10.5);
  EXPECT_EQ(reader.progress(), (Progress{.step = 3, .step_s = 0.5}));
  reader.add("saved 3 2500\nstep 4\n", 14);  // the time of a save is no step's
  EXPECT_EQ(reader.progress(), (Progress{.step = 4, .saved = 3, .step_s = 0.5, .save_s = 2.5}));
}

TEST(Progress, WhatMeansNothingIsPassedOver) {
  ProgressReader reader;
  for (const char* line : {"", "step", "step x", "step -4", "step 5 6", "saved 5", "saved 5 x", "saved 5 6 7",
                           "stepp 5", "step 99999999999999999999"})
    reader.add(std::string(line) + "\n", 1);
  reader.add(std::string(100000, 's'), 1);
  reader.add("\nstep 2\n", 2);
  EXPECT_EQ(reader.progress(), (Progress{.step = 2}));
}

TEST(Progress, ReachesTheLauncherThroughItsPipeOnly) {
  int ends[2], others[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::pipe(others), 0);
  struct stat found {};
  ASSERT_EQ(::fstat(ends[1], &found), 0);
  const auto environment = [&](int fd) {
    return read_environment(std::vector<std::string>{"TESSERA_PROGRESS=" + std::to_string(fd) + ":" +
                                                     std::to_string(found.st_ino)});
  };
  const ProgressReporter reporter(environment(ends[1]));
  reporter.step(12);
  reporter.saved(12, 0.25);
  for (int i = 0; i < 100000; ++i) reporter.step(13);  // nobody reads: none of them waits
  char text[128];
  const ssize_t got = ::read(ends[0], text, 22);
  EXPECT_EQ(std::string(text, static_cast<std::size_t>(got)), "step 12\nsaved 12 250\ns");

  const ProgressReporter stranger(environment(others[1]));  // the number now stands for something else
  stranger.step(1);
  const ProgressReporter nobody(read_environment(std::vector<std::string>{}));
  nobody.step(1);
  ::close(others[1]);
  EXPECT_EQ(::read(others[0], text, 1), 0);
  for (const int fd : {ends[0], ends[1], others[0]}) ::close(fd);
}

/// Restarts of a job that may have so many.
struct Allowed {
  explicit Allowed(int most) { options.max_restarts = most; }
  LaunchOptions options;
  Restarts restarts{options};
};

Outcome failed(std::int64_t step, std::int64_t saved, int code = 9) {
  return {Outcome::Kind::failed, code, 3, 0, "rank 0 failed", {.step = step, .saved = saved}};
}

TEST(Restarts, BackOffAndCountWhatWasAllowed) {
  Allowed job(8);
  Restarts& restarts = job.restarts;
  std::vector<double> delays;
  std::int64_t step = 0;
  while (const auto delay = restarts.next(failed(++step, 0))) delays.push_back(*delay);
  EXPECT_EQ(delays, (std::vector<double>{1, 2, 4, 8, 16, 32, 60, 60}));
  const LaunchResult result = restarts.give_up(failed(step, 0));
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_EQ(result.report, "rank 0 failed\n(all 8 restarts used up)");
}

TEST(Restarts, StopAfterThreeAttemptsThatCameToNothing) {
  Allowed job(100);
  Restarts& restarts = job.restarts;
  EXPECT_TRUE(restarts.next(failed(0, 0)));
  EXPECT_TRUE(restarts.next(failed(0, 0)));
  EXPECT_FALSE(restarts.next(failed(0, 0)));
  const LaunchResult result = restarts.give_up(failed(0, 0));
  EXPECT_EQ(result.exit_code, exit_code::kNoProgress);
  EXPECT_NE(result.report.find("given up after 2 of 100 restarts"), std::string::npos) << result.report;
}

TEST(Restarts, AStepOrACheckpointFurtherThanEverIsProgress) {
  Allowed job(100);
  Restarts& restarts = job.restarts;
  EXPECT_TRUE(restarts.next(failed(100, 50)));
  EXPECT_TRUE(restarts.next(failed(90, 50)));
  EXPECT_TRUE(restarts.next(failed(95, 50)));  // more than the one before, but not further
  EXPECT_TRUE(restarts.next(failed(60, 60)));  // a newer checkpoint
  EXPECT_TRUE(restarts.next(failed(61, 0)));
  EXPECT_TRUE(restarts.next(failed(99, 0)));
  EXPECT_TRUE(restarts.next(failed(101, 0)));
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(restarts.next(failed(101, 60)));
  EXPECT_FALSE(restarts.next(failed(101, 60)));
}

TEST(Restarts, NoneAreMadeUnasked) {
  Allowed job(0);
  Restarts& restarts = job.restarts;
  EXPECT_FALSE(restarts.next(failed(5, 5)));
  EXPECT_EQ(restarts.give_up(failed(5, 5)).report, "rank 0 failed");
}

WorkerEnd ended(int exit_code, int signal_number = 0, int asked = 0, std::vector<std::string> lines = {}) {
  WorkerEnd end;
  end.exit_code = exit_code;
  end.signal = signal_number;
  end.asked = asked;
  end.last_lines = std::move(lines);
  return end;
}

Outcome outcome(const std::vector<WorkerEnd>& ends) { return outcome_of(ends, "h", 0); }

TEST(Ends, APreemptedJobHasNotFailed) {
  const WorkerEnd saved = ended(exit_code::kPreempted);
  EXPECT_EQ(outcome({saved, saved}).kind, Outcome::Kind::preempted);
  EXPECT_EQ(outcome({saved, ended(0)}).code, exit_code::kPreempted);
  EXPECT_EQ(outcome({saved, ended(3)}).code, 3);  // it could not save
  EXPECT_EQ(outcome({saved, ended(0, SIGTERM, SIGTERM)}).kind,
            Outcome::Kind::done);                               // the supervisor knows more
  EXPECT_EQ(outcome({ended(0, SIGTERM)}).code, 128 + SIGTERM);  // nobody had asked
  EXPECT_EQ(outcome({ended(143, 0, SIGTERM), ended(5, 0, SIGTERM)}).kind, Outcome::Kind::done);

  const Outcome preempted = outcome({saved}), done, bad = failed(0, 0);
  EXPECT_EQ(combine(std::vector{done, preempted, done}).kind, Outcome::Kind::preempted);
  EXPECT_EQ(combine(std::vector{preempted, bad}).kind, Outcome::Kind::failed);
  EXPECT_EQ(Outcome::decode(preempted.encode()), preempted);
}

TEST(Ends, WhoOnlyWaitedGivesTheJobItsCode) {
  EXPECT_EQ(outcome({ended(1, 0, 0, {"CommunicationError: lost the connection to rank 2"})}).code,
            exit_code::kLostPeer);
  EXPECT_EQ(outcome({ended(1, 0, 0, {"CommunicationError: all_reduce did not finish within 3 s"})}).code,
            exit_code::kNoAnswer);
  EXPECT_EQ(outcome({ended(1, 0, 0,
                           {"CommunicationError: rank 0 hangs in f(): no operation began or ended for 2 s"})})
                .code,
            exit_code::kNoAnswer);
  EXPECT_EQ(outcome({ended(exit_code::kNoAnswer)}).code, exit_code::kNoAnswer);
  EXPECT_EQ(outcome({ended(exit_code::kLostPeer)}).code, exit_code::kLostPeer);
  WorkerEnd stopped = ended(0, SIGKILL);
  stopped.told = stopped.stopped = true;
  EXPECT_EQ(outcome({ended(exit_code::kLostPeer), stopped}).code, exit_code::kNoAnswer);
}

TEST(Ends, TheFurthestProgressIsTheJobs) {
  WorkerEnd one = ended(3), other = ended(0);
  one.progress = {.step = 3, .saved = 2};
  other.progress = {.step = 4};
  EXPECT_EQ(outcome({one, other}).progress, (Progress{.step = 4, .saved = 2}));
  Outcome here = failed(3, 1), there = failed(2, 2);
  EXPECT_EQ(combine(std::vector{here, there}).progress, (Progress{.step = 3, .saved = 2}));
}

TEST(ExitCodes, AreDistinct) {
  int last = -1;
  for (const exit_code::Row& row : exit_code::table()) {
    EXPECT_GT(row.code, last) << row.meaning;
    last = row.code;
  }
}

}  // namespace
}  // namespace tessera::launching
