#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

enum class Epilogue : std::uint8_t {
  none,
  gelu_tanh,  ///< c = gelu(x), pre = x where x = a b + bias
  gelu_erf,
};

/// C[m,n] = beta C + op(A)[m,k] op(B)[k,n] + bias[n], row-major, accumulated in fp32.
/// A is stored [m,k] (or [k,m] if trans_a) with leading dimension lda, B likewise.
struct Gemm {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  const void* bias = nullptr;  ///< [n] in ab_dtype, or null
  void* pre =
      nullptr;  ///< [m,n] like c: the value before the activation, when epilogue is not none; may be null
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;  ///< pre shares ldc
  bool trans_a = false, trans_b = false;
  DType ab_dtype = DType::f32;  ///< f32, bf16 or f16
  DType c_dtype = DType::f32;   ///< f32, bf16 or f16
  float beta = 0.0f;            ///< 0 or 1
  Epilogue epilogue = Epilogue::none;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(gemm, Gemm)
