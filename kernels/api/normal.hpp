#pragma once
/// Normal variates. A weight's first value must be the same bits on every machine and layout (law 1), which
/// the C library's log and sin do not promise: here they are series in double built from +, -, *, / and sqrt
/// alone, all of them exactly rounded everywhere as long as the compiler contracts nothing: on the host the
/// file that includes this one sees to that, on a GPU the operations of Exact do.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

/// A double whose sums and products are rounded one by one.
struct Exact {
  double value;

  // Not explicit: the series are written with plain numbers.
  TESSERA_INLINE constexpr Exact(double x) : value(x) {}
  TESSERA_INLINE friend Exact operator+(Exact a, Exact b) {
#if defined(__CUDA_ARCH__)
    return __dadd_rn(a.value, b.value);
#else
    return a.value + b.value;
#endif
  }
  TESSERA_INLINE friend Exact operator-(Exact a, Exact b) { return a + Exact(-b.value); }
  TESSERA_INLINE friend Exact operator*(Exact a, Exact b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a.value, b.value);
#else
    return a.value * b.value;
#endif
  }
  TESSERA_INLINE friend Exact operator/(Exact a, Exact b) { return a.value / b.value; }
};

/// Natural logarithm of a normal, positive x. With x = 2^k m, m in [0.7, 1.41], and s = (m-1)/(m+1):
/// log m = 2 (s + s^3/3 + s^5/5 + ...).
TESSERA_INLINE Exact log_of(Exact x) {
  std::uint64_t bits;
  std::memcpy(&bits, &x.value, sizeof bits);
  // Subtracting the bits of sqrt(1/2) makes the exponent field count up at sqrt(1/2) 2^k instead of at 2^k.
  const std::uint64_t root_half = 0x3fe6a09e667f3bcdu;
  const auto k = static_cast<std::int64_t>(bits - root_half) >> 52;
  bits -= static_cast<std::uint64_t>(k) << 52;
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  const Exact m = mantissa;
  const Exact s = (m - 1.0) / (m + 1.0);
  const Exact s2 = s * s;
  Exact series = 1.0 / 21.0;
  series = series * s2 + 1.0 / 19.0;
  series = series * s2 + 1.0 / 17.0;
  series = series * s2 + 1.0 / 15.0;
  series = series * s2 + 1.0 / 13.0;
  series = series * s2 + 1.0 / 11.0;
  series = series * s2 + 1.0 / 9.0;
  series = series * s2 + 1.0 / 7.0;
  series = series * s2 + 1.0 / 5.0;
  series = series * s2 + 1.0 / 3.0;
  series = series * s2 + 1.0;
  return 2.0 * s * series + static_cast<double>(k) * Exact(0.693147180559945309);
}

struct NormalPair {
  Exact first, second;
};

/// Cosine and sine of 2 pi turn / 2^32: Taylor series within 45 degrees of the nearest quarter turn.
TESSERA_INLINE NormalPair cos_sin(std::uint32_t turn) {
  const std::uint32_t quarter = (turn + 0x20000000u) >> 30;
  const auto rest = static_cast<std::int32_t>(turn - (quarter << 30));
  const Exact a = static_cast<double>(rest) * Exact(6.28318530717958648 / 4294967296.0);
  const Exact a2 = a * a;
  Exact sine = -1.0 / 1307674368000.0;
  sine = sine * a2 + 1.0 / 6227020800.0;
  sine = sine * a2 - 1.0 / 39916800.0;
  sine = sine * a2 + 1.0 / 362880.0;
  sine = sine * a2 - 1.0 / 5040.0;
  sine = sine * a2 + 1.0 / 120.0;
  sine = sine * a2 - 1.0 / 6.0;
  sine = sine * a2 * a + a;
  Exact cosine = 1.0 / 20922789888000.0;
  cosine = cosine * a2 - 1.0 / 87178291200.0;
  cosine = cosine * a2 + 1.0 / 479001600.0;
  cosine = cosine * a2 - 1.0 / 3628800.0;
  cosine = cosine * a2 + 1.0 / 40320.0;
  cosine = cosine * a2 - 1.0 / 720.0;
  cosine = cosine * a2 + 1.0 / 24.0;
  cosine = cosine * a2 - 0.5;
  cosine = cosine * a2 + 1.0;
  switch (quarter & 3u) {
    case 0:
      return {cosine, sine};
    case 1:
      return {-sine.value, cosine};
    case 2:
      return {-cosine.value, -sine.value};
    default:
      return {sine, -cosine.value};
  }
}

/// Box & Muller, "A note on the generation of random normal deviates" (1958): radius sqrt(-2 log((w0 + 1/2) /
/// 2^32)), angle 2 pi w1 / 2^32.
TESSERA_INLINE NormalPair normals(std::uint32_t w0, std::uint32_t w1) {
  const Exact uniform = (static_cast<double>(w0) + 0.5) / 4294967296.0;  // exact: 33 bits and a power of two
  const Exact radius = std::sqrt((-2.0 * log_of(uniform)).value);
  const NormalPair direction = cos_sin(w1);
  return {radius * direction.first, radius * direction.second};
}

}  // namespace tessera::kernels
