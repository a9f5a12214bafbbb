#pragma once
#include <cstdint>

#include "kernels/cpu/vector/isa.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels::cpu {

/// C[m, n] = beta C + A[m, k] B[n, k]^T + bias[n] with so few rows in A that reading B is the work: each of
/// its rows is read once.
struct FewRows {
  std::int64_t m = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  const float* a = nullptr;
  DType b_dtype = DType::f32;  ///< of the bias too
  const void* b = nullptr;
  const void* bias = nullptr;  ///< or null
  DType c_dtype = DType::f32;
  void* c = nullptr;
  bool accumulate = false;
};

}  // namespace tessera::kernels::cpu

TESSERA_EACH_ISA(
    /// Columns [begin, end) of C.
    void gemm_few_rows_range(const FewRows& product, std::int64_t begin, std::int64_t end);)
