#include <cmath>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/split_norm.hpp"

namespace tessera::kernels::cpu {

void row_products(const RowProducts& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(row_products_rows);
  parallel_for(launch.threads, params.rows, 4,
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

void inverse_roots(const InverseRoots& params, const Launch&) {
  for (std::int64_t i = 0; i < params.n; ++i)
    params.values[i] = 1.0f / std::sqrt(params.values[i] / params.width + params.eps);
}

void norm_projection(const NormProjection& params, const Launch& launch) {
  auto* rows = TESSERA_PICK(norm_projection_rows);
  parallel_for(launch.threads, params.rows, 4,
               [&](std::int64_t begin, std::int64_t end, int) { rows(params, begin, end); });
}

}  // namespace tessera::kernels::cpu
