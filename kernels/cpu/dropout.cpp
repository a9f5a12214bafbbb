#include <cstring>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/dropout.hpp"

namespace tessera::kernels::cpu {

void dropout(const Dropout& params, const Launch& launch) {
  if (!params.spec.active()) {
    if (params.x != params.y) {
      const auto row_bytes = static_cast<std::size_t>(params.cols) * size_of(params.dtype);
      parallel_for(launch.threads, params.rows, 16, [&](std::int64_t begin, std::int64_t end, int) {
        const auto offset = static_cast<std::size_t>(begin) * row_bytes;
        std::memcpy(static_cast<char*>(params.y) + offset, static_cast<const char*>(params.x) + offset,
                    static_cast<std::size_t>(end - begin) * row_bytes);
      });
    }
    return;
  }
  auto* rows = TESSERA_PICK(dropout_rows);
  parallel_for(launch.threads, params.rows, 4,
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
