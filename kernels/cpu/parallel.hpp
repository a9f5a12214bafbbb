#pragma once
/// Splitting work over the CPU threads of one rank. Two implementations, chosen by CMake: OpenMP
/// (parallel_openmp.cpp) and std::thread (parallel_threads.cpp) for builds under a sanitizer.

#include <cstdint>
#include <type_traits>
#include <utility>

namespace tessera::kernels::cpu {

namespace detail {
using RangeFunction = void (*)(void* context, std::int64_t begin, std::int64_t end, int thread);
void parallel_ranges(int threads, std::int64_t n, std::int64_t grain, RangeFunction function, void* context);
}  // namespace detail

/// Calls body(begin, end, thread) on disjoint ranges covering [0, n), at most one per thread, each a multiple
/// of `grain` long but the last. Runs inline when one range is enough. `body` must not throw.
template <typename Body>
void parallel_for(int threads, std::int64_t n, std::int64_t grain, Body&& body) {
  using B = std::remove_reference_t<Body>;
  detail::parallel_ranges(
      threads, n, grain,
      [](void* context, std::int64_t begin, std::int64_t end, int thread) {
        (*static_cast<B*>(context))(begin, end, thread);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace tessera::kernels::cpu
