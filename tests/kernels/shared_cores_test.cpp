/// Whether others want a rank's cores, and what is done then.

#include "kernels/api/shared_cores.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

#include "kernels/api/reduce.hpp"
#include "kernels/cpu/parallel.hpp"

namespace tessera {
namespace {

TEST(SharedCores, AreWantedWhenATenthOfTheTimeIsWaitingAndNoMoreWhenItIsAlmostNothing) {
  SharedCores::Verdict verdict;
  EXPECT_FALSE(verdict.after(0.05, 0.0));
  EXPECT_FALSE(verdict.after(0.05, 0.02)) << "somebody came by";
  for (int look = 0; look < 50; ++look) EXPECT_FALSE(verdict.after(0.05, 0.004)) << "a little";
  EXPECT_TRUE(verdict.after(0.05, 0.025)) << "a program that takes turns with this one";
  for (int look = 0; look < 50; ++look) EXPECT_TRUE(verdict.after(0.05, 0.003)) << "neither much nor nothing";
  for (int look = 0; look < 3; ++look) EXPECT_TRUE(verdict.after(0.05, 0.0)) << look;
  EXPECT_FALSE(verdict.after(0.05, 0.0));
  EXPECT_TRUE(verdict.after(1.0, 0.11)) << "a long look counts alone";
  EXPECT_FALSE(verdict.after(1.0, 0.02));
}

/// Seconds of processor time that a team of two takes while the thread that leads it mostly sleeps.
double spinning_s() {
  const auto processor_s = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double begin = processor_s();
  for (int turn = 0; turn < 25; ++turn) {
    kernels::cpu::parallel_for(2, 2, 1, [](std::int64_t, std::int64_t, int) {});
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
  }
  return processor_s() - begin;
}

TEST(SharedCores, ShortWaitsSpareTheProcessor) {
  const double own = spinning_s();
  if (own < 0.02) GTEST_SKIP() << "threads sleep soon already: " << own << " s";
  {
    const kernels::ShortWaits waits;
    EXPECT_LT(spinning_s(), own / 2);
  }
  EXPECT_GT(spinning_s(), own / 2) << "as before";
}

/// Threads that work with short waits are those of any other time.
TEST(SharedCores, KernelsRunWithShortWaitsAsWithout) {
  std::vector<float> x(1 << 20);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 1013) * 1e-3f;
  const auto sums = [&](int threads) {
    std::vector<float> y(64), scratch(static_cast<std::size_t>(kernels::kReduceParts) * 64);
    kernels::ColumnSum sum;
    sum.x = x.data(), sum.out = y.data(), sum.scratch = scratch.data();
    sum.rows = static_cast<std::int64_t>(x.size()) / 64, sum.cols = sum.ld = 64;
    kernels::cpu::column_sum(sum, {.threads = threads});
    return y;
  };
  const auto expected = sums(2);
  for (int turn = 0; turn < 3; ++turn) {
    const kernels::ShortWaits waits;
    EXPECT_EQ(sums(2), expected);
    EXPECT_EQ(sums(1), expected) << "one thread";
  }
  EXPECT_EQ(sums(2), expected);
}

}  // namespace
}  // namespace tessera
