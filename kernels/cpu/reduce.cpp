#include <algorithm>

#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/vector/reduce.hpp"

namespace tessera::kernels::cpu {
namespace {

double total_of(const double* parts, std::int64_t count) {
  double total = 0.0;
  for (std::int64_t part = 0; part < count; ++part) total += parts[part];
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
  const std::int64_t parts = std::min<std::int64_t>(params.num_runs, kReduceParts);
  auto* range = TESSERA_PICK(sum_squares_range);
  parallel_for(launch.threads, parts, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) {
      double total = 0.0;
      for (std::int64_t i = params.num_runs * part / parts; i < params.num_runs * (part + 1) / parts; ++i)
        total += range(params.x + params.runs[i].begin, params.runs[i].count);
      params.scratch[part] = total;
    }
  });
  *params.out += total_of(params.scratch, parts);
}

void sum(const Sum& params, const Launch& launch) {
  constexpr std::int64_t kSmallest = 4096;  // floats: smaller parts are not worth handing out
  const std::int64_t n = params.n, parts = std::clamp<std::int64_t>(n / kSmallest, 1, kReduceParts);
  auto* range = TESSERA_PICK(sum_range);
  parallel_for(launch.threads, parts, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t part = begin; part < end; ++part) {
      // Divided first, so that no product overflows; parts begin at multiples of 16.
      const std::int64_t size = ((n + parts - 1) / parts + 15) / 16 * 16;
      const std::int64_t first = std::min(n, part * size), last = std::min(n, first + size);
      params.scratch[part] = range(params.x + first, last - first);
    }
  });
  const double sum = total_of(params.scratch, parts);
  *params.out = params.add ? *params.out + sum : sum;
}

}  // namespace tessera::kernels::cpu
