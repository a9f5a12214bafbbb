#include <algorithm>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/reduce.hpp"

namespace tessera::kernels::cpu {
namespace {

/// Fills scratch with partial results over parts that depend on n alone and returns their sum, first to last.
template <typename Range>
double over_parts(const float* x, std::int64_t n, double* scratch, const Launch& launch, Range* range) {
  constexpr std::int64_t kSmallest = 4096;  // floats: smaller parts are not worth handing out
  const std::int64_t parts = std::clamp<std::int64_t>(n / kSmallest, 1, kReduceParts);
  parallel_for(launch.threads, parts, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) {
      // Divided first, so that no product overflows; parts begin at multiples of 16.
      const std::int64_t size = ((n + parts - 1) / parts + 15) / 16 * 16;
      const std::int64_t first = std::min(n, part * size), last = std::min(n, first + size);
      scratch[part] = range(x + first, last - first);
    }
  });
  double total = 0.0;
  for (std::int64_t part = 0; part < parts; ++part) total += scratch[part];
  return total;
}

}  // namespace

void column_sum(const ColumnSum& params, const Launch& launch) {
  // The partition depends on the number of rows alone, so that the order of summation does not depend on
  // threads.
  const std::int64_t parts = std::clamp<std::int64_t>(params.rows / 8, 1, kReduceParts);
  auto* rows = TESSERA_PICK(column_sum_rows);
  parallel_for(launch.threads, parts, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) {
      rows(params, params.rows * part / parts, params.rows * (part + 1) / parts,
           params.scratch + part * params.cols);
    }
  });
  auto* columns = TESSERA_PICK(column_sum_columns);
  parallel_for(launch.threads, params.cols, 256,
               [&](std::int64_t begin, std::int64_t end, int) { columns(params, parts, begin, end); });
}

void sum_squares(const SumSquares& params, const Launch& launch) {
  *params.out += over_parts(params.x, params.n, params.scratch, launch, TESSERA_PICK(sum_squares_range));
}

void sum(const Sum& params, const Launch& launch) {
  const double sum = over_parts(params.x, params.n, params.scratch, launch, TESSERA_PICK(sum_range));
  *params.out = params.add ? *params.out + sum : sum;
}

}  // namespace tessera::kernels::cpu
