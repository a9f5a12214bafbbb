/// gemm without oneDNN: cache-blocked with packed panels (Goto and van de Geijn, "Anatomy of high-performance
/// matrix multiplication"), threads over rows of C. Every sum runs over k in rising order, whatever the
/// number of threads.

#include <algorithm>

#include "kernels/api/backends.hpp"
#include "kernels/cpu/gemm_common.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/scratch.hpp"
#include "kernels/cpu/vector/gemm_tile.hpp"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kRows = 96, kCols = 512, kDepth = 256;  // a block of A in L2, a block of B in L2 or L3
static_assert(kRows % kGemmRows == 0 && kCols % kGemmCols == 0);

/// Panels of `width` vectors of op(X), zero-padded to whole panels: out[panel][k][i] = x[i * vector + k *
/// step].
void pack(const float* x, std::int64_t vectors, std::int64_t vector, std::int64_t depth, std::int64_t step,
          std::int64_t width, float* out) {
  for (std::int64_t v0 = 0; v0 < vectors; v0 += width) {
    const std::int64_t count = std::min(width, vectors - v0);
    for (std::int64_t k = 0; k < depth; ++k, out += width) {
      const float* from = x + v0 * vector + k * step;
      for (std::int64_t i = 0; i < count; ++i) out[i] = from[i * vector];
      std::fill(out + count, out + width, 0.0f);
    }
  }
}

void multiply_rows(const Gemm& g, std::int64_t begin, std::int64_t end, float* scratch) {
  const float* a = static_cast<const float*>(g.a);
  const float* b = static_cast<const float*>(g.b);
  float* c = static_cast<float*>(g.c);
  float* packed_a = scratch;
  float* packed_b = scratch + kRows * kDepth;
  const std::int64_t a_row = g.trans_a ? 1 : g.lda, a_step = g.trans_a ? g.lda : 1;
  const std::int64_t b_col = g.trans_b ? g.ldb : 1, b_step = g.trans_b ? 1 : g.ldb;
  for (std::int64_t n0 = 0; n0 < g.n; n0 += kCols) {
    const std::int64_t cols = std::min(kCols, g.n - n0);
    for (std::int64_t k0 = 0; k0 < g.k; k0 += kDepth) {
      const std::int64_t depth = std::min(kDepth, g.k - k0);
      pack(b + n0 * b_col + k0 * b_step, cols, b_col, depth, b_step, kGemmCols, packed_b);
      for (std::int64_t m0 = begin; m0 < end; m0 += kRows) {
        const std::int64_t rows = std::min(kRows, end - m0);
        pack(a + m0 * a_row + k0 * a_step, rows, a_row, depth, a_step, kGemmRows, packed_a);
        TESSERA_PICK(gemm_tile)
        ({.rows = rows,
          .cols = cols,
          .depth = depth,
          .a = packed_a,
          .b = packed_b,
          .c = c + m0 * g.ldc + n0,
          .ldc = g.ldc,
          .accumulate = k0 > 0 || g.beta != 0.0f});
      }
    }
  }
}

void add_bias(const Gemm& g, std::int64_t begin, std::int64_t end) {
  const float* bias = static_cast<const float*>(g.bias);
  for (std::int64_t r = begin; r < end; ++r) {
    float* row = static_cast<float*>(g.c) + r * g.ldc;
    for (std::int64_t i = 0; i < g.n; ++i) row[i] += bias[i];
  }
}

}  // namespace

void gemm(const Gemm& params, const Launch& launch) {
  if (params.m == 0 || params.n == 0) return;
  Gemm g = params;
  g.c = gemm_target(params, launch);
  if (g.k == 0) {
    gemm_without_product(g, launch);
  } else if (has_few_rows(g)) {
    gemm_few_rows(g, launch.threads);
  } else if (g.ab_dtype != DType::f32 || g.c_dtype != DType::f32) {
    gemm_through_f32(g, launch);
  } else {
    constexpr std::int64_t kScratch = (kRows + kCols) * kDepth;
    const Scratch scratch(static_cast<std::size_t>(std::max(1, launch.threads) * kScratch) * sizeof(float));
    parallel_for(launch.threads, g.m, kGemmRows, [&](std::int64_t begin, std::int64_t end, int thread) {
      multiply_rows(g, begin, end, scratch.as<float>() + thread * kScratch);
      if (g.bias != nullptr) add_bias(g, begin, end);
    });
  }
  gemm_apply_epilogue(params, launch);
  if (params.column_sums != nullptr) column_sum(sums_of(params), launch);
}

std::string gemm_library() { return "plain"; }

}  // namespace tessera::kernels::cpu
