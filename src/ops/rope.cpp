#include "tessera/ops/rope.hpp"

#include <cmath>
#include <numbers>

#include "kernels/api/rope.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

double scaled_frequency(double frequency, const RopeScaling& scaling) {
  if (scaling.factor == 1.0) return frequency;
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  const double original = static_cast<double>(scaling.original_max_positions);
  if (wavelength > original / scaling.low_freq_factor) return frequency / scaling.factor;
  if (wavelength < original / scaling.high_freq_factor) return frequency;
  const double smooth = (original / wavelength - scaling.low_freq_factor) /
                        (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency;
}

}  // namespace

RopeTable make_rope_table(const ExecCtx& ctx, std::int64_t max_positions, std::int64_t rotary_dim,
                          double theta, const RopeScaling& scaling, bool interleaved) {
  TESSERA_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0,
                "rotary embeddings turn pairs: rotary_dim = ", rotary_dim, " must be even");
  const std::int64_t half = rotary_dim / 2;
  if (ctx.device().is_meta())  // made on the host, for nobody
    return {Tensor::empty(ctx, {max_positions, half}, DType::f32),
            Tensor::empty(ctx, {max_positions, half}, DType::f32), interleaved};
  std::vector<float> cos(static_cast<std::size_t>(max_positions * half)), sin(cos.size());
  for (std::int64_t i = 0; i < half; ++i) {
    // fp32 frequencies and angles, as the models in circulation were trained with.
    const auto frequency = static_cast<float>(scaled_frequency(
        1.0 / std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim)), scaling));
    for (std::int64_t p = 0; p < max_positions; ++p) {
      const float angle = static_cast<float>(p) * frequency;
      cos[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::cos(static_cast<double>(angle)));
      sin[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
  return {Tensor::from(ctx, cos, {max_positions, half}), Tensor::from(ctx, sin, {max_positions, half}),
          interleaved};
}

void rope_in_place(const ExecCtx& ctx, const Tensor& x, const Tensor& positions, const RopeTable& table,
                   bool inverse) {
  TESSERA_CHECK(x.rank() == 4, "rotary embeddings take [seq, batch, heads, head_dim], not ", x.shape());
  detail::check_float(x.dtype(), "what rotary embeddings turn");
  const std::int64_t rows = x.size(0) * x.size(1);
  const std::int64_t rotary_dim = 2 * table.cos.size(1);
  TESSERA_CHECK(rotary_dim <= x.size(3), "rotary_dim ", rotary_dim, " exceeds head_dim ", x.size(3));
  TESSERA_CHECK((x.size(3) == 1 || x.strides()[3] == 1) && (x.size(2) == 1 || x.strides()[2] == x.size(3)) &&
                    (x.size(0) == 1 || x.strides()[0] == x.size(1) * x.strides()[1]),
                "rotary embeddings need evenly spaced rows of contiguous heads, strides are ", x.strides());
  TESSERA_CHECK_EQ(positions.numel(), rows, "one position per row");
  const kernels::Rope params{.rows = rows,
                             .heads = x.size(2),
                             .head_dim = x.size(3),
                             .rotary_dim = rotary_dim,
                             .dtype = x.dtype(),
                             .x = x.raw(),
                             .row_stride = x.strides()[1],
                             .positions = positions.data<std::int32_t>(),
                             .cos = table.cos.data<float>(),
                             .sin = table.sin.data<float>(),
                             .interleaved = table.interleaved,
                             .inverse = inverse};
  TESSERA_DISPATCH(ctx, rope, params);
}

}  // namespace tessera::ops
