#include "engine/throughput.hpp"

#include <algorithm>
#include <chrono>

#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/gemm.hpp"

namespace tessera {

double measure_gemm_rate(const ExecCtx& ctx, DType dtype) {
  constexpr std::int64_t n = 1024;
  // Random operands: constants draw less power on some machines and would flatter the rate.
  const Tensor random = Tensor::empty(ctx, {n, n}, DType::f32);
  ops::fill_normal(ctx, random, 1.0f, RngKey{}, {});
  const Tensor a = dtype == DType::f32 ? random : ops::cast(ctx, random, dtype);
  const Tensor c = Tensor::empty(ctx, {n, n}, DType::f32);
  double best = 0.0;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    ops::matmul_into(ctx, a, a, c, 0.0f, false, true);
    ctx.stream->synchronize();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2.0 * n * n * n / seconds);
  }
  return best;
}

}  // namespace tessera
