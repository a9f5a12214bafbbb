/// The search for the fastest way, on clocks made up here.

#include "kernels/cuda/gemm_search.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::kernels::cuda {
namespace {

using Seconds = std::vector<std::optional<double>>;

std::optional<FastestWay> search(const Seconds& real) {
  return fastest_way(real, [&](std::size_t way, double) { return real[way]; });
}

TEST(CudaGemmSearch, TheFastestIsKept) {
  const auto best = search({5.0, 3.0, 1.0, std::nullopt, 2.0, 4.0});
  ASSERT_TRUE(best);
  EXPECT_EQ(best->way, 2u);
  EXPECT_EQ(best->seconds, 1.0);
  EXPECT_EQ(best->first_s, 5.0) << "though it is not among the best";
  EXPECT_EQ(best->ran, 5);
}

TEST(CudaGemmSearch, WhatDoesNotRunIsLeftOut) {
  const auto best = search({std::nullopt, 3.0, 4.0});
  ASSERT_TRUE(best);
  EXPECT_EQ(best->way, 1u);
  EXPECT_EQ(best->first_s, 3.0) << "the first that runs";
  EXPECT_FALSE(search({std::nullopt}));
  EXPECT_FALSE(search({}));
}

TEST(CudaGemmSearch, TheFirstStaysWhereNoneIsClearlyFaster) {
  EXPECT_EQ(search({1.0, 0.995})->way, 0u);
  EXPECT_EQ(search({1.0, 0.985, 0.98})->way, 2u);
}

/// A clock that falls while the search runs, and a glance that was lucky.
TEST(CudaGemmSearch, TurnsAndMediansDecide) {
  const std::vector<double> real{1.0, 0.8, 1.2};
  double slower = 1.0;
  const auto best = fastest_way({1.0, 0.8, 0.1}, [&](std::size_t way, double) {
    slower *= 1.02;
    return std::optional(real[way] * slower);
  });
  ASSERT_TRUE(best);
  EXPECT_EQ(best->way, 1u);
  EXPECT_GT(best->first_s, best->seconds * 1.1);
}

}  // namespace
}  // namespace tessera::kernels::cuda
