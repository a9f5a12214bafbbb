#include "tessera/data/numpy_random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "tessera/base/error.hpp"

namespace tessera {

NumpyRandom::NumpyRandom(std::uint32_t seed) {
  state_[0] = seed;
  for (std::uint32_t i = 1; i < kWords; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }
}

void NumpyRandom::refill() {
  constexpr std::size_t kShift = 397;
  constexpr std::uint32_t kRefillsPerReport = 4096;
  if (report_ && ++refills_ % kRefillsPerReport == 0) report_();
  const auto twist = [](std::uint32_t high, std::uint32_t low) {
    const std::uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (mixed >> 1) ^ (0x9908b0dfu & (0u - (low & 1u)));
  };
  auto& s = state_;
  for (std::size_t i = 0; i < kWords - kShift; ++i) s[i] = s[i + kShift] ^ twist(s[i], s[i + 1]);
  for (std::size_t i = kWords - kShift; i < kWords - 1; ++i)
    s[i] = s[i + kShift - kWords] ^ twist(s[i], s[i + 1]);
  s[kWords - 1] = s[kShift - 1] ^ twist(s[kWords - 1], s[0]);
  for (std::size_t i = 0; i < kWords; ++i) {
    std::uint32_t y = s[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    output_[i] = y ^ (y >> 18);
  }
  position_ = 0;
}

/// picks[k] = the first masked output not above limit - k. Without a branch on the outcome, which no
/// predictor knows.
void NumpyRandom::draw(std::span<std::uint32_t> picks, std::uint32_t limit, std::uint32_t mask) {
  const std::size_t count = picks.size();
  for (std::size_t filled = 0; filled < count;) {
    if (position_ == kWords) refill();
    std::size_t at = position_;
    for (; at < kWords && filled < count; ++at) {
      const std::uint32_t value = output_[at] & mask;
      picks[filled] = value;
      filled += value <= limit - static_cast<std::uint32_t>(filled) ? 1 : 0;
    }
    position_ = at;
  }
}

std::uint64_t NumpyRandom::draw_wide(std::uint64_t limit) {
  const std::uint64_t mask = std::numeric_limits<std::uint64_t>::max() >> std::countl_zero(limit);
  for (;;) {
    const std::uint64_t high = next();
    const std::uint64_t value = ((high << 32) | next()) & mask;
    if (value <= limit) return value;
  }
}

std::int64_t NumpyRandom::randint(std::int64_t low, std::int64_t high) {
  constexpr std::int64_t kMost = std::int64_t{1} << 32;
  TESSERA_CHECK(low < high && high - low <= kMost, "randint(", low, ", ", high, ")");
  const auto limit = static_cast<std::uint32_t>(high - low - 1);
  if (limit == 0) return low;
  std::array<std::uint32_t, 1> pick;
  draw(pick, limit, std::numeric_limits<std::uint32_t>::max() >> std::countl_zero(limit));
  return low + pick[0];
}

std::int64_t NumpyRandom::choice(std::span<const double> p) {
  TESSERA_CHECK(!p.empty(), "a choice of nothing");
  double total = 0;
  for (const double each : p) total += each;
  const double drawn = random();
  double sum = 0;
  std::int64_t at = 0;
  // searchsorted(cumsum(p) / cumsum(p)[-1], drawn, side="right")
  for (const double each : p) {
    sum += each;
    if (sum / total > drawn) return at;
    ++at;
  }
  return static_cast<std::int64_t>(p.size()) - 1;
}

std::int64_t NumpyRandom::geometric(double p) {
  TESSERA_CHECK(p > 0 && p < 1.0 / 3, "geometric(", p, ")");
  return std::max<std::int64_t>(1, std::llround(std::ceil(std::log1p(-random()) / std::log(1 - p))));
}

template <typename T>
void NumpyRandom::shuffle_values(std::span<T> values) {
  if (values.size() < 2) return;
  std::uint64_t i = values.size() - 1;
  for (; i > std::numeric_limits<std::uint32_t>::max(); --i) std::swap(values[i], values[draw_wide(i)]);
  std::array<std::uint32_t, 256> buffer;
  T* const a = values.data();
  while (i > 0) {
    // Outputs are drawn ahead of the swaps, so that the far ends of a block of swaps are fetched at once.
    const std::uint64_t mask = std::numeric_limits<std::uint64_t>::max() >> std::countl_zero(i);
    const std::uint64_t count = std::min<std::uint64_t>(buffer.size(), i - (mask >> 1));
    const auto picks = std::span(buffer).first(static_cast<std::size_t>(count));
    draw(picks, static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(mask));
    for (const std::uint32_t pick : picks) __builtin_prefetch(a + pick, 1);
    for (const std::uint32_t pick : picks) std::swap(a[i--], a[pick]);
  }
}

void NumpyRandom::shuffle(std::span<std::int32_t> values) { shuffle_values(values); }
void NumpyRandom::shuffle(std::span<std::uint32_t> values) { shuffle_values(values); }
void NumpyRandom::shuffle(std::span<std::int64_t> values) { shuffle_values(values); }

}  // namespace tessera
