#include "kernels/cpu/gemm_common.hpp"

#include <algorithm>

#include "kernels/api/elementwise.hpp"
#include "kernels/cpu/parallel.hpp"
#include "kernels/cpu/scratch.hpp"
#include "kernels/cpu/vector/activation.hpp"
#include "kernels/cpu/vector/elementwise.hpp"
#include "kernels/cpu/vector/gemm_few_rows.hpp"

namespace tessera::kernels::cpu {
namespace {

/// Edge of the blocks of gemm_through_f32: three of them, 12 MB, stay in a last-level cache, and widening an
/// element is followed by 1024 multiplications of it.
constexpr std::int64_t kBlock = 1024;

const void* at(const void* p, DType dtype, std::int64_t element) {
  return static_cast<const char*>(p) + element * static_cast<std::int64_t>(size_of(dtype));
}
void* at(void* p, DType dtype, std::int64_t element) {
  return static_cast<char*>(p) + element * static_cast<std::int64_t>(size_of(dtype));
}

/// to[rows, cols] = from, widened, both row-major.
void widen(const void* from, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld, float* to,
           const Launch& launch) {
  auto* range = TESSERA_PICK(axpby_range);
  parallel_for(launch.threads, rows, std::max<std::int64_t>(1, 4096 / cols),
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t r = begin; r < end; ++r) {
                   range({.n = cols, .x_dtype = dtype, .x = at(from, dtype, r * ld), .y = to + r * cols}, 0,
                         cols);
                 }
               });
}

/// C = beta C + bias + sum over a block whose corner is C's element (row0, col0), rounded to C's dtype once.
void write_block(const Gemm& g, std::int64_t row0, std::int64_t col0, std::int64_t rows, std::int64_t cols,
                 float* sum, const Launch& launch) {
  auto* range = TESSERA_PICK(axpby_range);
  parallel_for(
      launch.threads, rows, std::max<std::int64_t>(1, 4096 / cols),
      [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t r = begin; r < end; ++r) {
          float* row = sum + r * cols;
          if (g.bias != nullptr) {
            range(
                {.n = cols, .beta = 1.0f, .x_dtype = g.ab_dtype, .x = at(g.bias, g.ab_dtype, col0), .y = row},
                0, cols);
          }
          range({.n = cols,
                 .beta = g.beta,
                 .y_dtype = g.c_dtype,
                 .x = row,
                 .y = at(g.c, g.c_dtype, (row0 + r) * g.ldc + col0)},
                0, cols);
        }
      });
}

/// The epilogue on `count` neighbours from C's element `first` on.
void apply_epilogue(const Gemm& g, std::int64_t first, std::int64_t count) {
  const bool tanh = g.epilogue == Epilogue::gelu_tanh || g.epilogue == Epilogue::dgelu_tanh;
  const Activation kind = tanh ? Activation::gelu_tanh : Activation::gelu_erf;
  void* c = at(g.c, g.c_dtype, first);
  const void* x = g.pre != nullptr ? at(g.pre, g.c_dtype, first) : c;
  if (is_gradient(g.epilogue)) {
    TESSERA_PICK(activation_backward_range)
    ({.n = count, .kind = kind, .dtype = g.c_dtype, .x = x, .dy = c, .dx = c}, 0, count);
  } else {
    TESSERA_PICK(activation_forward_range)
    ({.n = count, .kind = kind, .dtype = g.c_dtype, .x = x, .y = c}, 0, count);
  }
}

}  // namespace

void gemm_through_f32(const Gemm& g, const Launch& launch) {
  const std::int64_t mb = std::min(g.m, kBlock), nb = std::min(g.n, kBlock), kb = std::min(g.k, kBlock);
  const Scratch scratch(static_cast<std::size_t>(mb * kb + kb * nb + mb * nb) * sizeof(float));
  float* a = scratch.as<float>();
  float* b = a + mb * kb;
  float* sum = b + kb * nb;
  for (std::int64_t n0 = 0; n0 < g.n; n0 += nb) {
    const std::int64_t n = std::min(nb, g.n - n0);
    for (std::int64_t m0 = 0; m0 < g.m; m0 += mb) {
      const std::int64_t m = std::min(mb, g.m - m0);
      for (std::int64_t k0 = 0; k0 < g.k; k0 += kb) {
        const std::int64_t k = std::min(kb, g.k - k0);
        const std::int64_t lda = g.trans_a ? m : k, ldb = g.trans_b ? k : n;
        const std::int64_t a0 = g.trans_a ? k0 * g.lda + m0 : m0 * g.lda + k0;
        const std::int64_t b0 = g.trans_b ? n0 * g.ldb + k0 : k0 * g.ldb + n0;
        widen(at(g.a, g.ab_dtype, a0), g.ab_dtype, g.trans_a ? k : m, lda, g.lda, a, launch);
        widen(at(g.b, g.ab_dtype, b0), g.ab_dtype, g.trans_b ? n : k, ldb, g.ldb, b, launch);
        gemm({.a = a,
              .b = b,
              .c = sum,
              .m = m,
              .n = n,
              .k = k,
              .lda = lda,
              .ldb = ldb,
              .ldc = n,
              .trans_a = g.trans_a,
              .trans_b = g.trans_b,
              .beta = k0 == 0 ? 0.0f : 1.0f},
             launch);
      }
      write_block(g, m0, n0, m, n, sum, launch);
    }
  }
}

bool has_few_rows(const Gemm& g) {
  // With more rows the arithmetic takes longer than the reading, and a library's blocks are better at it.
  constexpr std::int64_t kFewRows = 16;
  return g.m <= kFewRows && !g.trans_a && g.trans_b;
}

void gemm_few_rows(const Gemm& g, int threads) {
  const bool widened = g.ab_dtype != DType::f32;
  const Scratch scratch(widened ? static_cast<std::size_t>(g.m * g.k) * sizeof(float) : 0);
  if (widened) widen(g.a, g.ab_dtype, g.m, g.k, g.lda, scratch.as<float>(), {.threads = 1});
  const FewRows product{.m = g.m,
                        .k = g.k,
                        .lda = widened ? g.k : g.lda,
                        .ldb = g.ldb,
                        .ldc = g.ldc,
                        .a = widened ? scratch.as<float>() : static_cast<const float*>(g.a),
                        .b_dtype = g.ab_dtype,
                        .b = g.b,
                        .bias = g.bias,
                        .c_dtype = g.c_dtype,
                        .c = g.c,
                        .accumulate = g.beta != 0.0f};
  auto* range = TESSERA_PICK(gemm_few_rows_range);
  // Groups of rows of B that are read together; a thread gets 32 KiB at least.
  const std::int64_t grain = std::max<std::int64_t>(1, 8192 / (g.k * 8)) * 8;
  parallel_for(threads, g.n, grain,
               [&](std::int64_t begin, std::int64_t end, int) { range(product, begin, end); });
}

void gemm_without_product(const Gemm& g, const Launch& launch) {
  auto* range = TESSERA_PICK(axpby_range);
  parallel_for(launch.threads, g.m, std::max<std::int64_t>(1, 4096 / g.n),
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t r = begin; r < end; ++r) {
                   // Without a bias, C += 0 * C, or C = 0 * C with C not read when alpha is 0.
                   const bool biased = g.bias != nullptr;
                   range({.n = g.n,
                          .alpha = biased ? 1.0f : 0.0f,
                          .beta = g.beta,
                          .x_dtype = g.ab_dtype,
                          .y_dtype = g.c_dtype,
                          .x = g.bias,
                          .y = at(g.c, g.c_dtype, r * g.ldc)},
                         0, g.n);
                 }
               });
}

void* gemm_target(const Gemm& g, const Launch& launch) {
  if (g.epilogue == Epilogue::none || is_gradient(g.epilogue) || g.pre == nullptr) return g.c;
  if (g.beta != 0.0f) {
    copy_strided({.size = {1, 1, g.m, g.n},
                  .src_stride = {0, 0, g.ldc, 1},
                  .dst_stride = {0, 0, g.ldc, 1},
                  .dtype = g.c_dtype,
                  .src = g.c,
                  .dst = g.pre},
                 launch);
  }
  return g.pre;
}

void gemm_apply_epilogue(const Gemm& g, const Launch& launch) {
  if (g.epilogue == Epilogue::none) return;
  if (g.ldc == g.n) {
    parallel_for(launch.threads, g.m * g.n, 4096,
                 [&](std::int64_t begin, std::int64_t end, int) { apply_epilogue(g, begin, end - begin); });
    return;
  }
  parallel_for(launch.threads, g.m, std::max<std::int64_t>(1, 4096 / g.n),
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t r = begin; r < end; ++r) apply_epilogue(g, r * g.ldc, g.n);
               });
}

}  // namespace tessera::kernels::cpu
