#include "tessera/device/exec_ctx.hpp"

#include <sched.h>

#include <algorithm>

namespace tessera {
namespace {

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace

ExecCtx ExecCtx::cpu(int threads, std::uint64_t seed) {
  return {std::make_shared<Stream>(threads > 0 ? threads : available_cores()),
          std::make_shared<CachingAllocator>(), seed};
}

}  // namespace tessera
