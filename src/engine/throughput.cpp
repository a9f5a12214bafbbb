#include "engine/throughput.hpp"

#include <algorithm>
#include <limits>

#include "tessera/base/clock.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/gemm.hpp"

namespace tessera {

namespace {

/// Seconds of the fastest of a few calls of `run` on the stream.
template <typename Run>
double fastest(const ExecCtx& ctx, Run&& run) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 5; ++i) {
    ctx.stream->synchronize();
    const double begin = now_s();
    run();
    ctx.stream->synchronize();
    best = std::min(best, now_s() - begin);
  }
  return best;
}

/// Seconds of one n x n x n product.
double time_product(const ExecCtx& ctx, DType dtype, std::int64_t n) {
  // Random operands: constants draw less power on some machines and would flatter the rate.
  const Tensor random = Tensor::empty(ctx, {n, n}, DType::f32);
  ops::fill_normal(ctx, random, 1.0f, RngKey{}, {});
  const Tensor a = dtype == DType::f32 ? random : ops::cast(ctx, random, dtype);
  const Tensor c = Tensor::empty(ctx, {n, n}, DType::f32);
  return fastest(ctx, [&] { ops::matmul_into(ctx, a, a, c, 0.0f, false, true); });
}

}  // namespace

double measure_gemm_rate(const ExecCtx& ctx, DType dtype) {
  std::int64_t n = 1024;
  double seconds = time_product(ctx, dtype, n);
  // A product that is over at once measures how long a launch takes.
  while (seconds < 1e-3 && n < 8192) seconds = time_product(ctx, dtype, n *= 2);
  const auto side = static_cast<double>(n);
  return 2.0 * side * side * side / seconds;
}

double measure_copy_rate(const ExecCtx& ctx) {
  const Tensor from = Tensor::empty(ctx, {std::int64_t{16} << 20}, DType::f32);  // more than caches hold
  const Tensor to = Tensor::empty(ctx, from.shape(), DType::f32);
  ops::fill_zero(ctx, from);
  return 2.0 * static_cast<double>(from.nbytes()) / fastest(ctx, [&] { ops::copy(ctx, from, to); });
}

}  // namespace tessera
