#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

/// Fixed partitions of a reduction, so that its order never depends on threads: the most parts of a column
/// sum and of a sum. A sum's are many, since a GPU must have one for each block it runs at once.
inline constexpr int kReduceParts = 64;
inline constexpr int kSumParts = 1024;

/// out[c] = beta out[c] + sum over rows of x[r, c]: a bias gradient.
struct ColumnSum {
  std::int64_t rows = 0, cols = 0, ld = 0;
  DType dtype = DType::f32;
  const void* x = nullptr;   ///< [rows, ld]
  float* out = nullptr;      ///< [cols]
  float beta = 0.0f;         ///< 0 or 1
  float* scratch = nullptr;  ///< [kReduceParts, cols]
};

/// Consecutive elements of a buffer: at most kMost, so that many blocks have alike work.
struct SumRun {
  static constexpr std::int64_t kMost = 16384;
  std::int64_t begin = 0, count = 0;
};

/// *out += sum of squares of the floats in some runs of x, in fp64 and in an order that depends on the runs'
/// number and lengths alone, not on where they lie.
struct SumSquares {
  std::int64_t num_runs = 0;
  const SumRun* runs = nullptr;  ///< [num_runs]
  const float* x = nullptr;
  double* out = nullptr;
  double* scratch = nullptr;  ///< [kSumParts]
};

/// *out = sum of n floats in fp64, over fixed parts; added to *out with `add`.
struct Sum {
  std::int64_t n = 0;
  bool add = false;
  const float* x = nullptr;
  double* out = nullptr;
  double* scratch = nullptr;  ///< [kSumParts]
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(column_sum, ColumnSum)
TESSERA_DECLARE_KERNEL(sum_squares, SumSquares)
TESSERA_DECLARE_KERNEL(sum, Sum)
