#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

inline constexpr int kReduceParts =
    64;  ///< fixed partition of a reduction: its order never depends on threads

/// out[c] = beta out[c] + sum over rows of x[r, c]: a bias gradient.
struct ColumnSum {
  std::int64_t rows = 0, cols = 0, ld = 0;
  DType dtype = DType::f32;
  const void* x = nullptr;   ///< [rows, ld]
  float* out = nullptr;      ///< [cols]
  float beta = 0.0f;         ///< 0 or 1
  float* scratch = nullptr;  ///< [kReduceParts, cols]
};

/// *out += sum of squares of n floats, accumulated in fp64 over fixed parts.
struct SumSquares {
  std::int64_t n = 0;
  const float* x = nullptr;
  double* out = nullptr;
  double* scratch = nullptr;  ///< [kReduceParts]
};

/// *out = sum of n floats in fp64, over fixed parts.
struct Sum {
  std::int64_t n = 0;
  const float* x = nullptr;
  double* out = nullptr;
  double* scratch = nullptr;  ///< [kReduceParts]
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(column_sum, ColumnSum)
TESSERA_DECLARE_KERNEL(sum_squares, SumSquares)
TESSERA_DECLARE_KERNEL(sum, Sum)
