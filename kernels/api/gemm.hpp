#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "kernels/api/reduce.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

enum class Epilogue : std::uint8_t {
  none,
  gelu_tanh,  ///< c = gelu(x), pre = x where x = a b + bias
  gelu_erf,
  dgelu_tanh,  ///< c = (a b) gelu'(pre): pre is read, there is no bias, beta is 0
  dgelu_erf,
};
/// Whether `pre` is read, not written.
constexpr bool is_gradient(Epilogue epilogue) {
  return epilogue == Epilogue::dgelu_tanh || epilogue == Epilogue::dgelu_erf;
}

/// C[m,n] = beta C + op(A)[m,k] op(B)[k,n] + bias[n], row-major, accumulated in fp32.
/// A is stored [m,k] (or [k,m] if trans_a) with leading dimension lda, B likewise.
struct Gemm {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  const void* bias = nullptr;  ///< [n] in ab_dtype, or null
  /// [m,n] like c: the value before the activation, where there is an epilogue. Written, and may be null; an
  /// input of the gradients.
  void* pre = nullptr;
  /// [m], or null: column_sums = sums_beta column_sums + sums over the rows of A as it is stored, in fp32:
  /// the bias gradient beside a weight gradient. With trans_a, and without bias and epilogue.
  float* column_sums = nullptr;
  float* sums_scratch = nullptr;  ///< [kReduceParts, m], with column_sums
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;  ///< pre shares ldc
  bool trans_a = false, trans_b = false;
  DType ab_dtype = DType::f32;  ///< f32, bf16 or f16
  DType c_dtype = DType::f32;   ///< f32, bf16 or f16
  float beta = 0.0f;            ///< 0 or 1
  float sums_beta = 0.0f;       ///< 0 or 1
  Epilogue epilogue = Epilogue::none;
};

/// The column sums of a product as a pass of its own.
inline ColumnSum sums_of(const Gemm& g) {
  return {.rows = g.k,
          .cols = g.m,
          .ld = g.lda,
          .dtype = g.ab_dtype,
          .x = g.a,
          .out = g.column_sums,
          .beta = g.sums_beta,
          .scratch = g.sums_scratch};
}

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(gemm, Gemm)
