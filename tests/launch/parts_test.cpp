/// The launcher's parts: lines, causes, outcomes, environments; and small jobs in this process.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>

#include "launch/environment.hpp"
#include "launch/failure.hpp"
#include "launch/lines.hpp"
#include "launch/worker_environment.hpp"
#include "tessera/launch/settings.hpp"

namespace tessera::launching {
namespace {

std::vector<std::string> cut(const std::vector<std::string>& pieces) {
  LineCutter cutter;
  std::vector<std::string> lines;
  const auto add = [&](std::string_view line) { lines.emplace_back(line); };
  for (const std::string& piece : pieces) cutter.add(piece, add);
  cutter.finish(add);
  return lines;
}

using Lines = std::vector<std::string>;

TEST(LineCutter, CutsWhereverThePiecesEnd) {
  EXPECT_EQ(cut({"a\nbc", "d\n", "\ne", "f"}), (Lines{"a", "bcd", "", "ef"}));
  EXPECT_EQ(cut({"a\r\nb\r", "\n"}), (Lines{"a", "b"}));
  EXPECT_EQ(cut({"10%\r50%\r", "100%\nx"}), (Lines{"100%", "x"}));
  EXPECT_EQ(cut({}), Lines{});
  EXPECT_EQ(cut({"a\n"}), Lines{"a"});
}

TEST(LineCutter, CutsWhatIsTooLong) {
  const std::string longest(LineCutter::kLongest, 'x');
  EXPECT_EQ(cut({longest + "yz\n"}), (Lines{longest, "yz"}));
  EXPECT_EQ(cut({longest.substr(1), "a", "b"}), (Lines{longest.substr(1) + "a", "b"}));
}

TEST(Tail, KeepsTheLast) {
  Tail tail(2);
  for (const char* line : {"a", "b", "c"}) tail.add(line);
  EXPECT_EQ(tail.lines(), (Lines{"b", "c"}));
}

Lines tail_of(const Lines& said, std::size_t lines) {
  Tail tail(lines);
  for (const std::string& line : said) tail.add(line);
  return tail.lines();
}

TEST(Tail, KeepsATracebackWhole) {
  Lines traceback{"Traceback (most recent call last):"};
  for (int frame = 0; frame < 40; ++frame) {
    traceback.push_back("  File \"a.py\", line " + std::to_string(frame) + ", in f");
    traceback.push_back("    f()");
  }
  traceback.push_back("ValueError: no");
  Lines said{"before", "it"};
  said.insert(said.end(), traceback.begin(), traceback.end());
  EXPECT_EQ(tail_of(said, 3), traceback);

  // What is said afterwards comes after it, until there is more of that than is kept anyway.
  Lines after = said;
  after.insert(after.end(), {"x", "y"});
  Lines expected = traceback;
  expected.insert(expected.end(), {"x", "y"});
  EXPECT_EQ(tail_of(after, 3), expected);
  after.insert(after.end(), {"z", "last"});
  EXPECT_EQ(tail_of(after, 3), (Lines{"y", "z", "last"}));
}

TEST(Tail, KeepsChainedTracebacksAndTheLastOfOthers) {
  const Lines first{"Traceback (most recent call last):", "  File 1", "    a", "KeyError: 1"};
  const Lines second{"Traceback (most recent call last):", "  File 2", "    b", "ValueError: 2"};
  Lines chained = first;
  chained.insert(chained.end(),
                 {"", "During handling of the above exception, another exception occurred:", ""});
  chained.insert(chained.end(), second.begin(), second.end());
  EXPECT_EQ(tail_of(chained, 6), chained);
  Lines apart = first;
  apart.insert(apart.end(), second.begin(), second.end());
  EXPECT_EQ(tail_of(apart, 2), second);
  EXPECT_EQ(tail_of(apart, 6).size(), 6U);
  Lines endless{"Traceback (most recent call last):"};
  endless.resize(5000, "  File");
  EXPECT_EQ(tail_of(endless, 4).size(), 4U);
}

TEST(Cores, AreSharedOut) {
  const int cores = usable_cores();
  for (const int workers : {1, 2, cores, cores + 3}) {
    std::vector<int> all;
    for (int rank = 0; rank < workers; ++rank) {
      const std::vector<int> share = share_of_cores(rank, workers);
      EXPECT_GE(share.size(), 1U);
      all.insert(all.end(), share.begin(), share.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    EXPECT_EQ(all.size(), static_cast<std::size_t>(cores)) << workers << " workers";
  }
}

TEST(Outlet, KeepsWhatTheOtherSideDoesNotTake) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  Outlet outlet(ends[1]);
  const std::string text(2 << 20, 'x');
  outlet.add(text);
  EXPECT_TRUE(outlet.full());
  outlet.flush(0.05);
  EXPECT_FALSE(outlet.empty());
  std::string got(65536, '\0');
  got.resize(static_cast<std::size_t>(::read(ends[0], got.data(), got.size())));
  EXPECT_EQ(got, text.substr(0, got.size()));
  ::close(ends[0]);
  ::signal(SIGPIPE, SIG_IGN);
  outlet.flush(1);
  EXPECT_TRUE(outlet.empty());
  ::signal(SIGPIPE, SIG_DFL);
  ::close(ends[1]);
}

TEST(Variables, SetAndDefault) {
  Variables variables{"A=1", "AB=2", "A=3"};
  EXPECT_EQ(value_of(variables, "A"), "1");
  EXPECT_EQ(value_of(variables, "B"), std::nullopt);
  default_variable(variables, "AB", "4");
  default_variable(variables, "C", "");
  set_variable(variables, "A", "5");
  EXPECT_EQ(variables, (Variables{"AB=2", "C=", "A=5"}));
}

TEST(WorkerEnvironment, RanksOfTheSecondMachine) {
  LaunchOptions options;
  options.num_processes = 6;
  options.num_machines = 2;
  options.machine_rank = 1;
  options.main_process_ip = "fe80::1";
  options.environment = {"RANK=99", "OMP_NUM_THREADS=2", "X=y", "CUDA_DEVICE_MAX_CONNECTIONS=16"};
  const Variables variables = worker_environment(options, {2, 4, "fe80::1:4000", "s"});
  const std::vector<std::pair<const char*, const char*>> expected{{"RANK", "5"},
                                                                  {"LOCAL_RANK", "2"},
                                                                  {"WORLD_SIZE", "6"},
                                                                  {"LOCAL_WORLD_SIZE", "3"},
                                                                  {"GROUP_RANK", "1"},
                                                                  {"MASTER_PORT", "4000"},
                                                                  {"MASTER_ADDR", "fe80::1"},
                                                                  {"TESSERA_JOB_SECRET", "s"},
                                                                  {"TESSERA_RESTART", "4"},
                                                                  {"OMP_NUM_THREADS", "2"},
                                                                  {"CUDA_DEVICE_MAX_CONNECTIONS", "16"},
                                                                  {"CUDA_MODULE_LOADING", "EAGER"},
                                                                  {"X", "y"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(value_of(variables, name), value) << name;
  EXPECT_EQ(value_of(variables, "TESSERA_THREADS"), std::to_string(std::max(1, usable_cores() / 3)));
  options.environment.clear();
  EXPECT_EQ(value_of(worker_environment(options, {2, 4, "fe80::1:4000", "s"}), "CUDA_DEVICE_MAX_CONNECTIONS"),
            "32");
}

WorkerEnd end_of(int rank, int exit_code, int signal_number, double at_s, Lines lines = {}) {
  WorkerEnd end;
  end.rank = rank;
  end.pid = 100 + rank;
  end.exit_code = exit_code;
  end.signal = signal_number;
  end.at_s = at_s;
  end.last_lines = std::move(lines);
  return end;
}

TEST(FirstCause, SignalThenOwnErrorThenStoppedThenLostPeer) {
  const WorkerEnd fine = end_of(0, 0, 0, 1);
  const WorkerEnd lost = end_of(1, 1, 0, 2, {"CommunicationError: rank 4"});
  const WorkerEnd peer_code = end_of(2, kLostPeerExitCode, 0, 1.5);
  WorkerEnd stopped = end_of(3, 0, SIGKILL, 9);
  stopped.told = stopped.stopped = true;
  const WorkerEnd own = end_of(4, 3, 0, 4, {"no such file"});
  const WorkerEnd killed = end_of(5, 0, SIGSEGV, 5);
  WorkerEnd told = end_of(6, 0, SIGTERM, 0.1);
  told.told = true;

  const auto cause = [](const std::vector<WorkerEnd>& ends) {
    const auto found = first_cause(ends);
    return found ? ends[*found].rank : -1;
  };
  EXPECT_EQ(cause({fine, told}), -1);
  EXPECT_EQ(cause({fine, told, lost, peer_code}), 2);
  EXPECT_EQ(cause({fine, told, lost, peer_code, stopped}), 3);
  EXPECT_EQ(cause({fine, told, lost, own, peer_code, stopped}), 4);
  EXPECT_EQ(cause({fine, killed, told, lost, own, peer_code, stopped}), 5);
  EXPECT_EQ(cause({end_of(0, 2, 0, 3), end_of(1, 2, 0, 2)}), 1);
}

TEST(LostPeer, LastWordsOnly) {
  EXPECT_TRUE(lost_peer(end_of(0, 1, 0, 0, {"RuntimeError: Connection reset by peer"})));
  EXPECT_TRUE(lost_peer(end_of(0, 0, SIGPIPE, 0)));
  EXPECT_FALSE(lost_peer(end_of(0, 1, 0, 0, {"out of memory"})));
  EXPECT_FALSE(lost_peer(end_of(0, 0, SIGABRT, 0, {"Connection reset by peer"})));
  EXPECT_FALSE(
      lost_peer(end_of(0, 1, 0, 0, {"Connection refused, trying again", "1", "2", "3", "4", "5", "6"})));
}

TEST(Report, NamesTheCauseTheWitnessAndTheRest) {
  WorkerEnd told = end_of(2, 0, SIGTERM, 3);
  told.told = true;
  const std::vector<WorkerEnd> ends{end_of(0, 1, 0, 1, {"CommunicationError: all_reduce of dp"}),
                                    end_of(1, 0, SIGSEGV, 2, {"before", "the fall"}), told,
                                    end_of(3, 0, 0, 0.5)};
  EXPECT_EQ(report_failure(ends, "h"),
            "rank 1 (host h, pid 101) was killed by signal 11 (Segmentation fault). Its last lines:\n"
            "[rank 1] before\n[rank 1] the fall\n"
            "rank 0, which waited for others, said:\n[rank 0] CommunicationError: all_reduce of dp\n"
            "afterwards rank 0 exited with code 1\n"
            "afterwards rank 2 was ended by the launcher\n"
            "afterwards rank 3 ended without an error");
  EXPECT_EQ(report_failure(std::vector{end_of(0, 4, 0, 1)}, "h"),
            "rank 0 (host h, pid 100) exited with code 4; it had written nothing");
}

Outcome failed(int weight, std::int64_t at_ms, const char* report) {
  return {Outcome::Kind::failed, 1, weight, at_ms, report, {}};
}

TEST(Outcomes, TravelAsText) {
  const Outcome outcome{Outcome::Kind::failed, 137, 4, 1234567890123, "two\nlines", {.step = 7, .saved = 4}};
  EXPECT_EQ(Outcome::decode(outcome.encode()), outcome);
  EXPECT_EQ(Outcome::decode(Outcome{}.encode()), Outcome{});
  for (const char* text : {"", "9 0 0 0\n", "x", "1 2"})
    EXPECT_THROW(Outcome::decode(text), CommunicationError) << text;
}

TEST(Outcomes, TheWeightiestIsTheJobs) {
  const Outcome done, early = failed(3, 10, "early"), late = failed(3, 20, "late"),
                      weak = failed(1, 1, "weak");
  const Outcome lost{Outcome::Kind::lost, 1, 0, 0, "lost", {}};
  const Outcome interrupted{Outcome::Kind::interrupted, 130, 0, 0, "ctrl-c", {}};
  EXPECT_EQ(combine(std::vector{done, done}).kind, Outcome::Kind::done);
  EXPECT_EQ(combine(std::vector{done, late, early, weak}).report, "early");
  EXPECT_EQ(combine(std::vector{weak, lost}).report, "lost");
  EXPECT_EQ(combine(std::vector{lost, early}).report, "early");
  EXPECT_EQ(combine(std::vector{early, interrupted, done}).report, "ctrl-c");
}

/// What a small job writes to its standard output, and how it ends.
std::pair<LaunchResult, std::string> run_job(const std::string& script, int processes = 2) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  LaunchSettings settings;
  settings.num_processes = processes;
  LaunchOptions options = resolve_launch(settings, {{"sh", "-c", script}, false, {"PATH=/usr/bin:/bin"}, ""});
  options.stdout_fd = options.stderr_fd = ends[1];
  options.collect_s = 0.1;
  const LaunchResult result = launch(options, Logger::silent());
  ::close(ends[1]);
  std::string text(65536, '\0');
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, ::read(ends[0], text.data(), text.size()))));
  ::close(ends[0]);
  return {result, text};
}

TEST(Launch, RunsAJobAndGivesSignalsBack) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  const auto [result, text] = run_job("echo $RANK");
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.report, "");
  EXPECT_TRUE(text == "[rank 0] 0\n[rank 1] 1\n" || text == "[rank 1] 1\n[rank 0] 0\n") << text;
  for (int number = 1; number < 32; ++number) {
    EXPECT_EQ(sigismember(&before, number), sigismember(&after, number)) << number;
  }
}

TEST(Launch, WorkersHaveTheSignalMaskOfTheCaller) {
  EXPECT_EQ(run_job("grep SigBlk /proc/self/status", 1).second.find("0000000000000000") == std::string::npos,
            false);
}

TEST(Launch, ReportsAFailure) {
  const auto [result, text] = run_job("[ $RANK = 0 ] || exit 3; sleep 20");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.report.find("rank 1 (host "), std::string::npos) << result.report;
}

TEST(Launch, RefusesContradictions) {
  LaunchOptions options;
  EXPECT_THROW(launch(options, Logger::silent()), InvalidArgument);
  options.program = "/bin/true";
  options.argv = {"true"};
  options.num_processes = 3;
  options.num_machines = 2;
  EXPECT_THROW(launch(options, Logger::silent()), InvalidArgument);
  options.num_processes = 4;
  EXPECT_THROW(launch(options, Logger::silent()), InvalidArgument);  // no secret
}

}  // namespace
}  // namespace tessera::launching
