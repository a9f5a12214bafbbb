/// Normal variates. A weight's first value must be the same bits on every machine and layout (law 1), which
/// the C library's log and sin do not promise: here they are series in double built from +, -, *, / and sqrt
/// alone, all of them exactly rounded everywhere as long as the compiler contracts nothing.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#elif defined(__clang__)
#pragma clang fp contract(off)
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/api/elementwise.hpp"
#include "kernels/cpu/parallel.hpp"

namespace tessera::kernels::cpu {
namespace {

/// Natural logarithm of a normal, positive x. With x = 2^k m, m in [0.7, 1.41], and s = (m-1)/(m+1):
/// log m = 2 (s + s^3/3 + s^5/5 + ...).
double log_of(double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  // Subtracting the bits of sqrt(1/2) makes the exponent field count up at sqrt(1/2) 2^k instead of at 2^k.
  const std::uint64_t root_half = 0x3fe6a09e667f3bcdu;
  const auto k = static_cast<std::int64_t>(bits - root_half) >> 52;
  const auto m = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(k) << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double series = 1.0 / 21.0;
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
  return 2.0 * s * series + static_cast<double>(k) * 0.693147180559945309;
}

struct Pair {
  double first, second;
};

/// Cosine and sine of 2 pi turn / 2^32: Taylor series within 45 degrees of the nearest quarter turn.
Pair cos_sin(std::uint32_t turn) {
  const std::uint32_t quarter = (turn + 0x20000000u) >> 30;
  const auto rest = static_cast<std::int32_t>(turn - (quarter << 30));
  const double a = static_cast<double>(rest) * (6.28318530717958648 / 4294967296.0);
  const double a2 = a * a;
  double sine = -1.0 / 1307674368000.0;
  sine = sine * a2 + 1.0 / 6227020800.0;
  sine = sine * a2 - 1.0 / 39916800.0;
  sine = sine * a2 + 1.0 / 362880.0;
  sine = sine * a2 - 1.0 / 5040.0;
  sine = sine * a2 + 1.0 / 120.0;
  sine = sine * a2 - 1.0 / 6.0;
  sine = sine * a2 * a + a;
  double cosine = 1.0 / 20922789888000.0;
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
      return {-sine, cosine};
    case 2:
      return {-cosine, -sine};
    default:
      return {sine, -cosine};
  }
}

/// Box & Muller, "A note on the generation of random normal deviates" (1958): radius sqrt(-2 log((w0 + 1/2) /
/// 2^32)), angle 2 pi w1 / 2^32.
Pair normals(std::uint32_t w0, std::uint32_t w1) {
  const double radius = std::sqrt(-2.0 * log_of((static_cast<double>(w0) + 0.5) / 4294967296.0));
  const Pair direction = cos_sin(w1);
  return {radius * direction.first, radius * direction.second};
}

/// Elements [first, first + n) of the stream.
void fill_run(const FillNormal& p, std::uint64_t first, std::int64_t n, float* out) {
  const double mean = p.mean;
  const double std_dev = p.std;
  std::int64_t done = 0;
  while (done < n) {
    const std::uint64_t element = first + static_cast<std::uint64_t>(done);
    const PhiloxBlock words = random_block(p.key, element / 4);
    const Pair low = normals(words.word[0], words.word[1]);
    const Pair high = normals(words.word[2], words.word[3]);
    const double z[4] = {low.first, low.second, high.first, high.second};
    const auto lane = static_cast<std::int64_t>(element % 4);
    const std::int64_t count = std::min<std::int64_t>(4 - lane, n - done);
    for (std::int64_t i = 0; i < count; ++i) {
      out[done + i] = static_cast<float>(mean + std_dev * z[lane + i]);
    }
    done += count;
  }
}

}  // namespace

void fill_normal(const FillNormal& params, const Launch& launch) {
  parallel_for(launch.threads, params.rows * params.cols, 1024,
               [&](std::int64_t begin, std::int64_t end, int) {
                 for (std::int64_t i = begin; i < end;) {
                   const std::int64_t row = i / params.cols;
                   const std::int64_t col = i % params.cols;
                   const std::int64_t n = std::min(params.cols - col, end - i);
                   const std::int64_t element = (params.row0 + row) * params.global_cols + params.col0 + col;
                   fill_run(params, static_cast<std::uint64_t>(element), n, params.out + i);
                   i += n;
                 }
               });
}

}  // namespace tessera::kernels::cpu
