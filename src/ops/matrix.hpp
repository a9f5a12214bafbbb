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

/// Errors: InvalidArgument unless rows are evenly spaced and columns contiguous.
inline Matrix as_matrix(const Tensor& t, const char* what) {
  TESSERA_CHECK(t && t.rank() >= 1, what, " is not a matrix");
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

}  // namespace tessera::ops::detail
