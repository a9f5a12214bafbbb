#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu::detail {

void parallel_ranges(int threads, std::int64_t n, std::int64_t grain, RangeFunction function, void* context) {
  if (n <= 0) return;
  const std::int64_t chunks = (n + grain - 1) / grain;
  const std::int64_t workers = std::min<std::int64_t>(threads, chunks);
  if (workers <= 1) {
    function(context, 0, n, 0);
    return;
  }
  auto run = [&](std::int64_t self) {
    const std::int64_t begin = chunks * self / workers * grain;
    const std::int64_t end = std::min(n, chunks * (self + 1) / workers * grain);
    function(context, begin, end, static_cast<int>(self));
  };
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<std::size_t>(workers - 1));
  std::int64_t started = 1;
  try {
    for (; started < workers; ++started) helpers.emplace_back(run, started);
  } catch (const std::system_error&) {
    // The system grants no more threads: this one does their share.
    for (; started < workers; ++started) run(started);
  }
  run(0);
  for (auto& helper : helpers) helper.join();
}

}  // namespace tessera::kernels::cpu::detail
