#include "kernels/cpu/vector/gemm_few_rows.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {
namespace {

/// Rows of A that share a reading of B, and rows of B at a time: their products are summed up in registers.
#if defined(VEC_AVX512)
constexpr int kRows = 8, kCols = 3;
#else
constexpr int kRows = 4, kCols = 2;
#endif
constexpr int kColsAlone = 4;  ///< with one row of A
constexpr int kAhead = 8;      ///< groups of rows of B that are asked for before they are read

template <typename T>
VEC_INLINE void put(const FewRows& p, std::int64_t row, std::int64_t col, float value) {
  if (p.bias != nullptr) {
    if constexpr (dtype_of<T>::value == DType::f32) {
      value += static_cast<const T*>(p.bias)[col];
    } else {
      value += load_n(static_cast<const T*>(p.bias) + col, 1)[0];
    }
  }
  visit_dtype(p.c_dtype, [&](auto type) VEC_LAMBDA {
    auto* c = static_cast<decltype(type)*>(p.c) + row * p.ldc + col;
    if (p.accumulate) value += load_n(c, 1)[0];
    store_n(c, splat(value), 1);
  });
}

/// `Rows` rows of A from `row` on by `Cols` rows of B from `col` on.
template <int Rows, int Cols, typename T>
VEC_INLINE void block(const FewRows& p, std::int64_t row, std::int64_t col, bool ask) {
  const float* a = p.a + row * p.lda;
  const T* b = static_cast<const T*>(p.b) + col * p.ldb;
  const std::int64_t ahead = kAhead * Cols * p.ldb;
  F total[Rows][Cols] = {};
  for_lanes(0, p.k, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F x[Cols];
#pragma GCC unroll 4
    for (int c = 0; c < Cols; ++c) {
      x[c] = load(b + c * p.ldb + i, lanes);
      if (ask) prefetch(b + c * p.ldb + i + ahead);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const F y = load(a + r * p.lda + i, lanes);
#pragma GCC unroll 4
      for (int c = 0; c < Cols; ++c) total[r][c] += x[c] * y;
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < Cols; ++c) put<T>(p, row + r, col + c, sum(total[r][c]));
  }
}

template <int Rows, typename T>
void block_of(const FewRows& p, std::int64_t row, std::int64_t col, int cols, bool ask) {
  if constexpr (Rows == 1) {
    if (cols == kColsAlone) return block<1, kColsAlone, T>(p, row, col, ask);
    for (int c = 0; c < cols; ++c) block<1, 1, T>(p, row, col + c, false);
  } else {
    if (cols == kCols) return block<Rows, kCols, T>(p, row, col, ask);
    for (int c = 0; c < cols; ++c) block<Rows, 1, T>(p, row, col + c, false);
  }
}

/// The rows that are left when whole blocks are done, fewer than kRows.
template <typename T>
void rest(const FewRows& p, std::int64_t row, std::int64_t col, int cols, bool ask) {
  switch (p.m - row) {
    case 1:
      return block_of<1, T>(p, row, col, cols, ask);
    case 2:
      return block_of<2, T>(p, row, col, cols, ask);
    case 3:
      return block_of<3, T>(p, row, col, cols, ask);
#if defined(VEC_AVX512)
    case 4:
      return block_of<4, T>(p, row, col, cols, ask);
    case 5:
      return block_of<5, T>(p, row, col, cols, ask);
    case 6:
      return block_of<6, T>(p, row, col, cols, ask);
    case 7:
      return block_of<7, T>(p, row, col, cols, ask);
#endif
    default:
      return;
  }
}

}  // namespace

void gemm_few_rows_range(const FewRows& p, std::int64_t begin, std::int64_t end) {
  visit_dtype(p.b_dtype, [&](auto type) {
    using T = decltype(type);
    const int step = p.m == 1 ? kColsAlone : kCols;
    for (std::int64_t col = begin; col < end; col += step) {
      const int cols = static_cast<int>(end - col < step ? end - col : step);
      const bool ask = col + (kAhead + 1) * step <= end;
      std::int64_t row = 0;
      for (; row + kRows <= p.m; row += kRows) block_of<kRows, T>(p, row, col, cols, ask && row == 0);
      rest<T>(p, row, col, cols, ask && row == 0);
    }
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
