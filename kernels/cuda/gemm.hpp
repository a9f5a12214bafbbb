#pragma once
/// What the CUDA backend's matrix products offer beyond kernels/api/gemm.hpp.
///
/// A product of float32 is one of float32, never of TF32; the result has the operands' dtype or is float32.
/// The first product on a stream allocates that stream's workspace, and so has to come before the stream is
/// captured.
#include <cstdint>

#include "kernels/api/backends.hpp"
#include "kernels/api/gemm.hpp"
#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels::cuda {

/// `batch` products C_i[m,n] = alpha op(A_i)[m,k] op(B_i)[k,n] + beta C_i, row-major, accumulated in fp32,
/// i-th operand at `pointer + i * stride` elements. Layouts as in Gemm; a stride of 0 shares the operand.
struct BatchedGemm {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  bool trans_a = false, trans_b = false;
  DType ab_dtype = DType::f32;  ///< f32, bf16 or f16
  DType c_dtype = DType::f32;   ///< ab_dtype or f32
  float alpha = 1.0f;
  float beta = 0.0f;  ///< any; 0 never reads C
  std::int64_t batch = 0;
  std::int64_t stride_a = 0, stride_b = 0, stride_c = 0;  ///< elements; the C_i must not overlap
};
/// k > 0. Errors: InvalidArgument for dtypes, DeviceError naming the failed call and the shape.
void batched_gemm(const BatchedGemm& params, const Launch& launch);

}  // namespace tessera::kernels::cuda
