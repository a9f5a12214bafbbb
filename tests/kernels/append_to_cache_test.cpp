#include <gtest/gtest.h>

#include "tests/kernels/cache_problem.hpp"

namespace tessera::kernels {
namespace {

using cache_test::Problem;

TEST(AppendToCache, EveryPositionGoesToItsPage) {
  for (const cache_test::Case& c : cache_test::cases()) {
    for (const int threads : {1, 2}) {
      Problem problem(c);
      cpu::append_to_cache(problem.params(), {nullptr, threads});
      problem.expect_kept(problem.kept_key, problem.kept_value, problem.begin);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
