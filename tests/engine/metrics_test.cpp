/// metrics.jsonl: what a line holds, and what happens to old lines.

#include "tessera/engine/metrics.hpp"

#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <limits>
#include <thread>

#include "tests/engine/engine_support.hpp"

namespace tessera {
namespace {

using test::slurp;
using test::spill;

struct Metrics : test::FolderTest {
  std::filesystem::path file() const { return dir_ / "metrics.jsonl"; }
};

StepRecord record(std::int64_t step, double loss = 2.5) {
  StepRecord r;
  r.step = step;
  r.loss = loss;
  r.grad_norm = 1.0;
  r.tokens = 64 * step;
  return r;
}

TEST_F(Metrics, ALineIsWholeAndHasEveryKeyInOrder) {
  MetricsFile metrics(file(), 0);
  metrics.write({.step = 3,
                 .loss = 5.54321001,
                 .grad_norm = 0.1,
                 .lr = 6e-4,
                 .tokens = 123456789012,
                 .tokens_per_s = 1234.5,
                 .mfu = 0.5,
                 .mfu_of_measured = 0.625,
                 .step_ms = 10,
                 .data_ms = 1,
                 .forward_ms = 2,
                 .backward_ms = 3,
                 .update_ms = 4,
                 .communication_share = 0.25,
                 .peak_mem_bytes = 5000000000,
                 .skipped = 1,
                 .eval_loss = 4.5});
  EXPECT_EQ(slurp(file()),
            "{\"step\":3,\"loss\":5.54321001,\"grad_norm\":0.1,\"lr\":0.0006,\"tokens\":123456789012,"
            "\"tokens_per_s\":1234.5,\"mfu\":0.5,\"mfu_of_measured\":0.625,\"step_ms\":10,\"data_ms\":1,"
            "\"forward_ms\":2,\"backward_ms\":3,\"update_ms\":4,\"communication_share\":0.25,\"peak_mem_"
            "bytes\":5000000000,\"skipped\":1,\"eval_loss\":4.5}\n");
}

TEST_F(Metrics, NineDigitsGiveEveryFloatBack) {
  MetricsFile metrics(file(), 0);
  const std::vector<float> values = {1.0f / 3.0f, 5.54321003f,     1.00000012f,
                                     3.4e38f,     1.17549435e-38f, 16777215.0f};
  for (std::size_t i = 0; i < values.size(); ++i)
    metrics.write(record(static_cast<std::int64_t>(i) + 1, values[i]));
  std::ifstream in(file());
  std::string line;
  for (const float value : values) {
    ASSERT_TRUE(std::getline(in, line));
    EXPECT_EQ(std::stof(line.substr(line.find("\"loss\":") + 7)), value);
  }
}

TEST_F(Metrics, WhatIsNotFiniteIsNull) {
  MetricsFile metrics(file(), 0);
  StepRecord r = record(1, std::nan(""));
  r.grad_norm = std::numeric_limits<double>::infinity();
  r.mfu = std::nullopt;
  metrics.write(r);
  const std::string line = slurp(file());
  for (const char* part : {"\"loss\":null", "\"grad_norm\":null", "\"mfu\":null"}) {
    EXPECT_NE(line.find(part), std::string::npos) << line;
  }
  EXPECT_EQ(line.find("nan"), std::string::npos);
}

TEST_F(Metrics, GoesOnAfterTheLastStepThatCounts) {
  const std::string one = "{\"step\":1,\"loss\":3}\n", two = "{\"step\":2,\"loss\":2}\n",
                    three = "{\"step\":3,\"loss\":1}\n";
  spill(file(), one + two + three + "{\"step\":4,\"lo");
  { const MetricsFile metrics(file(), 3); }
  EXPECT_EQ(slurp(file()), one + two + three);  // the half-written line is gone
  spill(file(), one + two + three + "{\"step\":4,\"loss\":0}\n");
  {
    MetricsFile metrics(file(), 2);
    EXPECT_EQ(slurp(file()), one + two);  // later steps will be made again
    metrics.write(record(3));
  }
  EXPECT_NE(slurp(file()).find(one + two + "{\"step\":3,\"loss\":2.5,"), std::string::npos);
  spill(file(), one + "rubbish\n" + two + "{\"loss\":1}\n[]\n" + three.substr(0, three.size() - 1));
  { const MetricsFile metrics(file(), 9); }
  EXPECT_EQ(slurp(file()), one + two);
  { const MetricsFile metrics(file(), 0); }
  EXPECT_EQ(slurp(file()), "");
}

/// A resume that is killed while it drops lines: the steps before those are never touched.
TEST_F(Metrics, AKillWhileLinesAreDroppedLosesNoOther) {
  constexpr int kLines = 2000, kKept = 1000;
  std::string whole;
  for (int step = 1; step <= kLines; ++step) whole += detail::concat("{\"step\":", step, "}\n");
  for (int round = 0; round < 10; ++round) {
    spill(file(), whole);
    const pid_t child = fork();
    if (child == 0) {
      for (int last = kLines; last >= kKept; --last) MetricsFile(file(), last);
      _exit(0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(3 * round));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::string left = slurp(file());
    EXPECT_TRUE(whole.starts_with(left) && left.ends_with("\n")) << left.size() << " bytes";
    EXPECT_GE(std::count(left.begin(), left.end(), '\n'), kKept);
    { const MetricsFile next(file(), kKept); }
    EXPECT_EQ(std::count_if(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(slurp(file()).size()),
                            [](char c) { return c == '\n'; }),
              kKept);
  }
}

TEST_F(Metrics, LinesAreThereAsSoonAsTheyAreWritten) {
  MetricsFile metrics(file(), 0);
  for (int step = 1; step <= 3; ++step) {
    metrics.write(record(step));
    const std::string text = slurp(file());
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), step);
  }
}

TEST_F(Metrics, AFullDiskIsAnError) {
  MetricsFile metrics(file(), 0);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 2000;
  setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    for (int step = 1; step < 100; ++step) metrics.write(record(step));
  } catch (const IoError& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("metrics.jsonl"), std::string::npos) << message;
}

TEST_F(Metrics, AFolderThatIsNotThereIsAnError) {
  test::expect_error<IoError>([&] { MetricsFile(dir_ / "nowhere" / "metrics.jsonl", 0); }, "nowhere");
}

}  // namespace
}  // namespace tessera
