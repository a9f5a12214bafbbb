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
constexpr int kColsAlone = 3;                      ///< with one row of A
constexpr std::int64_t kLine = 64, kAhead = 2048;  ///< bytes of a cache line; how far ahead B is asked for

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

/// `Rows` rows of A from `row` on by `Cols` rows of B, which are `apart` rows from each other: streams in
/// order, of which the hardware keeps several.
template <int Rows, int Cols, typename T>
VEC_INLINE void block(const FewRows& p, std::int64_t row, std::int64_t col, std::int64_t apart) {
  const float* a = p.a + row * p.lda;
  const T* b = static_cast<const T*>(p.b) + col * p.ldb;
  const std::int64_t stride = apart * p.ldb;
  F total[Rows][Cols] = {};
  const auto add = [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    F x[Cols];
#pragma GCC unroll 4
    for (int c = 0; c < Cols; ++c) x[c] = load(b + c * stride + i, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const F y = load(a + r * p.lda + i, lanes);
#pragma GCC unroll 4
      for (int c = 0; c < Cols; ++c) total[r][c] += x[c] * y;
    }
  };
  constexpr std::int64_t kStep = kLine / static_cast<std::int64_t>(sizeof(T));
  std::int64_t i = 0;
  for (; i + kStep <= p.k; i += kStep) {
#pragma GCC unroll 4
    for (int c = 0; c < Cols; ++c)
      prefetch(b + c * stride + i + kAhead / static_cast<std::int64_t>(sizeof(T)));
#pragma GCC unroll 4
    for (std::int64_t j = 0; j < kStep; j += kLanes) add(i + j, Whole{});
  }
  for_lanes(i, p.k, add);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < Cols; ++c) put<T>(p, row + r, col + c * apart, sum(total[r][c]));
  }
}

/// All rows of A by those rows of B.
template <int Cols, typename T>
void all_rows(const FewRows& p, std::int64_t col, std::int64_t apart) {
  std::int64_t row = 0;
  for (; row + kRows <= p.m; row += kRows) block<kRows, Cols, T>(p, row, col, apart);
  switch (p.m - row) {
    case 1:
      return block<1, Cols, T>(p, row, col, apart);
    case 2:
      return block<2, Cols, T>(p, row, col, apart);
    case 3:
      return block<3, Cols, T>(p, row, col, apart);
#if defined(VEC_AVX512)
    case 4:
      return block<4, Cols, T>(p, row, col, apart);
    case 5:
      return block<5, Cols, T>(p, row, col, apart);
    case 6:
      return block<6, Cols, T>(p, row, col, apart);
    case 7:
      return block<7, Cols, T>(p, row, col, apart);
#endif
    default:
      return;
  }
}

template <int Cols, typename T>
void columns(const FewRows& p, std::int64_t begin, std::int64_t end) {
  const std::int64_t apart = (end - begin) / Cols;
  for (std::int64_t col = begin; col < begin + apart; ++col) all_rows<Cols, T>(p, col, apart);
  for (std::int64_t col = begin + Cols * apart; col < end; ++col) all_rows<1, T>(p, col, 0);
}

}  // namespace

void gemm_few_rows_range(const FewRows& p, std::int64_t begin, std::int64_t end) {
  visit_dtype(p.b_dtype, [&](auto type) {
    using T = decltype(type);
    p.m == 1 ? columns<kColsAlone, T>(p, begin, end) : columns<kCols, T>(p, begin, end);
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
