#pragma once
/// How ops look at tensors: rows times columns.

#include "tessera/tensor/tensor.hpp"

namespace tessera::ops::detail {

/// All leading dimensions taken together as rows; `ld` elements from row to row.
struct Matrix {
  void* data;
  std::int64_t rows, cols, ld;
  DType dtype;
};

/// Kernels know these three and would take any other for bfloat16.
inline void check_float(DType dtype, const char* what) {
  TESSERA_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, what,
                " must be float32, bfloat16 or float16, not ", dtype);
}
/// Kernels of several dtypes have no code for both 16-bit types in one call.
inline void check_one_short(DType a, DType b, const char* what) {
  check_float(a, what);
  check_float(b, what);
  TESSERA_CHECK(a == b || a == DType::f32 || b == DType::f32, what, " must not mix ", a, " and ", b,
                "; cast one of them first");
}

/// Errors: InvalidArgument unless rows are evenly spaced, columns contiguous and elements floats.
inline Matrix as_matrix(const Tensor& t, const char* what) {
  TESSERA_CHECK(t && t.rank() >= 1, what, " is not a matrix");
  check_float(t.dtype(), what);
  const std::int64_t cols = t.size(-1);
  const std::int64_t rows = cols == 0 ? 0 : t.numel() / cols;
  TESSERA_CHECK(cols <= 1 || t.strides()[t.rank() - 1] == 1, what,
                ": the last dimension must be contiguous, strides are ", t.strides());
  if (t.rank() == 2) return {t.raw(), rows, cols, t.size(0) > 1 ? t.strides()[0] : cols, t.dtype()};
  TESSERA_CHECK(t.is_contiguous(), what, " of rank ", t.rank(), " must be contiguous, strides are ",
                t.strides());
  return {t.raw(), rows, cols, cols, t.dtype()};
}

inline void check_same_shape(const Tensor& a, const Tensor& b, const char* what) {
  TESSERA_CHECK(a.shape() == b.shape(), what, ": shapes ", a.shape(), " and ", b.shape(), " differ");
}
inline void check_contiguous(const Tensor& t, const char* what) {
  TESSERA_CHECK(t && t.is_contiguous(), what, " must be a contiguous tensor");
}
inline void check_contiguous_floats(const Tensor& t, const char* what) {
  check_contiguous(t, what);
  check_float(t.dtype(), what);
}

}  // namespace tessera::ops::detail
