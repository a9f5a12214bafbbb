#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels {

/// y = alpha x + beta y over n elements; with beta 0, y is written without being read. Dtypes f32, bf16 or
/// f16, mixed freely.
struct Axpby {
  std::int64_t n = 0;
  float alpha = 1.0f, beta = 0.0f;
  DType x_dtype = DType::f32, y_dtype = DType::f32;
  const void* x = nullptr;
  void* y = nullptr;
};

/// out = a + b.
struct Add {
  std::int64_t n = 0;
  DType a_dtype = DType::f32, b_dtype = DType::f32, out_dtype = DType::f32;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;  ///< may be the same memory as a or b
};

/// y = x where kept, scaled by 1/(1-p); forward and backward alike.
struct Dropout {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;
  const void* x = nullptr;
  void* y = nullptr;  ///< may be the same memory as x
  DropoutSpec spec = {};
};

/// x *= *factor, n floats; the factor is where kernels run.
struct ScaleBy {
  std::int64_t n = 0;
  const float* factor = nullptr;
  float* x = nullptr;
};

/// Copies a [n0, n1, n2, n3] box between strided buffers (strides in elements) of one dtype.
struct CopyStrided {
  std::int64_t size[4] = {1, 1, 1, 1};
  std::int64_t src_stride[4] = {0, 0, 0, 0};
  std::int64_t dst_stride[4] = {0, 0, 0, 0};
  DType dtype = DType::f32;
  const void* src = nullptr;
  void* dst = nullptr;
};

/// Sets n bytes to zero.
struct FillZero {
  std::int64_t bytes = 0;
  void* x = nullptr;
};

/// out[r, c] = mean + std * z(e), z standard normal, e = (row0 + r) * global_cols + col0 + c: the element's
/// global index. z comes from Box-Muller on words (0,1) and (2,3) of block e / 4, lane e % 4.
struct FillNormal {
  std::int64_t rows = 0, cols = 0;
  std::int64_t row0 = 0, col0 = 0, global_cols = 0;
  float mean = 0.0f, std = 1.0f;
  RngKey key;
  float* out = nullptr;  ///< [rows, cols] contiguous
};

/// x = value, n floats.
struct FillConstant {
  std::int64_t n = 0;
  float value = 0.0f;
  float* x = nullptr;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(axpby, Axpby)
TESSERA_DECLARE_KERNEL(add, Add)
TESSERA_DECLARE_KERNEL(dropout, Dropout)
TESSERA_DECLARE_KERNEL(scale_by, ScaleBy)
TESSERA_DECLARE_KERNEL(copy_strided, CopyStrided)
TESSERA_DECLARE_KERNEL(fill_zero, FillZero)
TESSERA_DECLARE_KERNEL(fill_normal, FillNormal)
TESSERA_DECLARE_KERNEL(fill_constant, FillConstant)
