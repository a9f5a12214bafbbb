#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

// What an RMSNorm needs besides add_norm_forward where ranks share the features of a row: its sums, which
// travel between the kernels.

/// out[r] = sum over columns of a[r] * b[r], in fp32.
struct RowProducts {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;  ///< of a and b
  const void* a = nullptr;   ///< [rows, cols]
  const void* b = nullptr;   ///< [rows, cols]; may be a
  float* out = nullptr;      ///< [rows]
};

/// values[r] = 1 / sqrt(values[r] / width + eps), of sums of squares.
struct InverseRoots {
  std::int64_t n = 0;
  float width = 1.0f, eps = 1e-5f;
  float* values = nullptr;  ///< [n]
};

/// y[r] -= x[r] * rstd[r]^2 * sums[r] / width: what the gradient of a norm loses along its input.
struct NormProjection {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;  ///< of x and y
  float width = 1.0f;
  const void* x = nullptr;      ///< [rows, cols]
  const float* rstd = nullptr;  ///< [rows]
  const float* sums = nullptr;  ///< [rows]
  void* y = nullptr;            ///< [rows, cols]
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(row_products, RowProducts)
TESSERA_DECLARE_KERNEL(inverse_roots, InverseRoots)
TESSERA_DECLARE_KERNEL(norm_projection, NormProjection)
