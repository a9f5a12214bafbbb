#include "tessera/ops/rope.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/api/rope.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

double llama3_frequency(double frequency, const RopeScaling& scaling) {
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  const double original = static_cast<double>(scaling.original_max_positions);
  if (wavelength > original / scaling.low_freq_factor) return frequency / scaling.factor;
  if (wavelength < original / scaling.high_freq_factor) return frequency;
  const double smooth = (original / wavelength - scaling.low_freq_factor) /
                        (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency;
}

/// The pairs between which YaRN blends scaled and unscaled frequencies.
struct YarnRamp {
  double low, high;

  YarnRamp(const RopeRule& rule, std::int64_t rotary_dim) {
    const RopeScaling& s = rule.scaling;
    const auto dim = static_cast<double>(rotary_dim),
               original = static_cast<double>(s.original_max_positions);
    const auto pair_of = [&](double turns) {
      return dim * std::log(original / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(rule.theta));
    };
    low = pair_of(s.beta_fast), high = pair_of(s.beta_slow);
    if (s.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0), high = std::min(high, dim - 1.0);
    if (low == high) high += 0.001;
  }
  double at(double pair) const { return std::clamp((pair - low) / (high - low), 0.0, 1.0); }
};

/// Frequency of every pair.
std::vector<double> frequencies(const RopeRule& rule, std::int64_t rotary_dim, std::int64_t length) {
  const RopeScaling& s = rule.scaling;
  const auto dim = static_cast<double>(rotary_dim);
  double theta = rule.theta;
  if (s.type == RopeType::dynamic && length > rule.trained) {
    const double stretch = s.factor * static_cast<double>(length) / static_cast<double>(rule.trained);
    theta *= std::pow(stretch - (s.factor - 1.0), dim / (dim - 2.0));
  }
  const YarnRamp ramp(rule, rotary_dim);
  std::vector<double> list;
  for (std::int64_t i = 0; i < rotary_dim / 2; ++i) {
    const double plain = 1.0 / std::pow(theta, 2.0 * static_cast<double>(i) / dim);
    const auto pair = static_cast<std::size_t>(i);
    switch (s.active() ? s.type : RopeType::dynamic) {
      case RopeType::dynamic:
        list.push_back(plain);
        break;
      case RopeType::linear:
        list.push_back(plain / s.factor);
        break;
      case RopeType::llama3:
        list.push_back(llama3_frequency(plain, s));
        break;
      case RopeType::yarn: {
        const double scaled = ramp.at(static_cast<double>(i));
        list.push_back(plain * (1.0 - scaled) + plain / s.factor * scaled);
        break;
      }
      case RopeType::longrope:
        list.push_back(plain / (length > s.original_max_positions ? s.long_factor : s.short_factor)[pair]);
        break;
    }
  }
  return list;
}

/// What cos and sin are multiplied by.
double magnitude(const RopeScaling& s) {
  if (!s.active() || (s.type != RopeType::yarn && s.type != RopeType::longrope)) return 1.0;
  if (s.attention_factor) return *s.attention_factor;
  if (s.factor <= 1.0) return 1.0;
  if (s.type == RopeType::yarn) return 0.1 * std::log(s.factor) + 1.0;
  return std::sqrt(1.0 + std::log(s.factor) / std::log(static_cast<double>(s.original_max_positions)));
}

}  // namespace

std::int64_t longest_usual(const RopeRule& rule) {
  if (!rule.scaling.active()) return 0;
  if (rule.scaling.type == RopeType::dynamic) return rule.trained;
  return rule.scaling.type == RopeType::longrope ? rule.scaling.original_max_positions : 0;
}

RopeTable make_rope_table(const ExecCtx& ctx, std::int64_t max_positions, std::int64_t rotary_dim,
                          const RopeRule& rule, std::int64_t length) {
  TESSERA_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0,
                "rotary embeddings turn pairs: rotary_dim = ", rotary_dim, " must be even");
  const std::int64_t half = rotary_dim / 2;
  const RopeScaling& scaling = rule.scaling;
  TESSERA_CHECK(scaling.type != RopeType::longrope ||
                    (std::ssize(scaling.short_factor) == half && std::ssize(scaling.long_factor) == half),
                "longrope needs ", half, " factors for short sequences and for long ones, not ",
                scaling.short_factor.size(), " and ", scaling.long_factor.size());
  TESSERA_CHECK(scaling.type != RopeType::dynamic || rotary_dim > 2,
                "dynamic stretching needs more than 2 rotated features");
  if (ctx.device().is_meta())  // made on the host, for nobody
    return {Tensor::empty(ctx, {max_positions, half}, DType::f32),
            Tensor::empty(ctx, {max_positions, half}, DType::f32), rule.interleaved};
  const std::vector<double> list = frequencies(rule, rotary_dim, length);
  const double scale = magnitude(scaling);
  std::vector<float> cos(static_cast<std::size_t>(max_positions * half)), sin(cos.size());
  for (std::int64_t i = 0; i < half; ++i) {
    // fp32 frequencies and angles, as the models in circulation were trained with.
    const auto frequency = static_cast<float>(list[static_cast<std::size_t>(i)]);
    for (std::int64_t p = 0; p < max_positions; ++p) {
      const double angle = static_cast<double>(static_cast<float>(p) * frequency);
      cos[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::cos(angle) * scale);
      sin[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::sin(angle) * scale);
    }
  }
  return {Tensor::from(ctx, cos, {max_positions, half}), Tensor::from(ctx, sin, {max_positions, half}),
          rule.interleaved};
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
