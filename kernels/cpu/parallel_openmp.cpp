#include <omp.h>

#include <algorithm>

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu::detail {

void parallel_ranges(int threads, std::int64_t n, std::int64_t grain, RangeFunction function, void* context) {
  if (n <= 0) return;
  const std::int64_t chunks = (n + grain - 1) / grain;
  if (threads <= 1 || chunks <= 1) {
    function(context, 0, n, 0);
    return;
  }
  // Always the same team size, though some threads may get nothing: a runtime that is asked for a smaller
  // team ends the threads it no longer needs and must create them again at the next call.
#pragma omp parallel num_threads(threads)
  {
    // The runtime may grant fewer threads than asked for: split by what it granted.
    const std::int64_t count = std::min<std::int64_t>(omp_get_num_threads(), chunks);
    const std::int64_t self = omp_get_thread_num();
    if (self < count) {
      const std::int64_t begin = chunks * self / count * grain;
      const std::int64_t end = std::min(n, chunks * (self + 1) / count * grain);
      function(context, begin, end, static_cast<int>(self));
    }
  }
}

}  // namespace tessera::kernels::cpu::detail
