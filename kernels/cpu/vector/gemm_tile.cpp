#include "kernels/cpu/vector/gemm_tile.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

static_assert(kGemmCols % (2 * kLanes) == 0);

/// kGemmRows rows by two registers of columns, of which `rows` and `cols` exist.
static void corner(const GemmTile& t, const float* a, const float* b, float* c, int rows, int cols) {
  F total[kGemmRows][2] = {};
  for (std::int64_t k = 0; k < t.depth; ++k) {
    const F b0 = load(b + k * kGemmCols), b1 = load(b + k * kGemmCols + kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < kGemmRows; ++i) {
      const F ai = splat(a[k * kGemmRows + i]);
      total[i][0] += ai * b0;
      total[i][1] += ai * b1;
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kGemmRows; ++i) {
    if (i >= rows) break;
    for (int half = 0; half < 2; ++half) {
      const int n = cols - half * kLanes;
      if (n <= 0) break;
      float* out = c + i * t.ldc + half * kLanes;
      if (n >= kLanes) {
        store(out, t.accumulate ? load(out) + total[i][half] : total[i][half]);
      } else {
        store_n(out, t.accumulate ? load_n(out, n) + total[i][half] : total[i][half], n);
      }
    }
  }
}

void gemm_tile(const GemmTile& t) {
  for (std::int64_t n0 = 0; n0 < t.cols; n0 += 2 * kLanes) {
    const float* b = t.b + n0 / kGemmCols * kGemmCols * t.depth + n0 % kGemmCols;
    const std::int64_t cols = t.cols - n0;
    for (std::int64_t m0 = 0; m0 < t.rows; m0 += kGemmRows) {
      const std::int64_t rows = t.rows - m0;
      corner(t, t.a + m0 * t.depth, b, t.c + m0 * t.ldc + n0,
             static_cast<int>(rows < kGemmRows ? rows : kGemmRows),
             static_cast<int>(cols < 2 * kLanes ? cols : 2 * kLanes));
    }
  }
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
