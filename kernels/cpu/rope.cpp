#include "kernels/api/rope.hpp"

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/rope.hpp"

namespace tessera::kernels::cpu {

void rope(const Rope& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(rope_rows);
  parallel_for(launch.threads, params.rows, 8,
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
