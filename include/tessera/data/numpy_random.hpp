#pragma once
/// What of numpy.random.RandomState(seed) training data are made with, bit for bit: MT19937 (Matsumoto and
/// Nishimura, 1998) and masked rejection.

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>

namespace tessera {

class NumpyRandom {
 public:
  explicit NumpyRandom(std::uint32_t seed);
  /// Calls `report` after every few million outputs from now on; may be empty.
  void on_progress(std::function<void()> report) { report_ = std::move(report); }

  /// The next 32-bit output.
  std::uint32_t next() {
    if (position_ == kWords) refill();
    return output_[position_++];
  }
  /// random_sample(): in [0, 1), of two outputs.
  double random() {
    const std::uint32_t high = next() >> 5, low = next() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }
  /// randint(low, high): in [low, high), of as many outputs as it takes; none where one value is left.
  /// Errors: InvalidArgument for no value, or more than 2^32.
  std::int64_t randint(std::int64_t low, std::int64_t high);
  /// choice(len(p), p=p): one random(), looked up in the running sum of `p`. Errors: InvalidArgument for an
  /// empty `p`.
  std::int64_t choice(std::span<const double> p);
  /// geometric(p) for p below 1/3, which numpy inverts: one random(); at least 1.
  std::int64_t geometric(double p);
  /// Fisher-Yates from the end, as numpy's legacy shuffle of a one-dimensional array.
  void shuffle(std::span<std::int32_t> values);
  void shuffle(std::span<std::uint32_t> values);
  void shuffle(std::span<std::int64_t> values);

 private:
  static constexpr std::size_t kWords = 624;

  void refill();
  void draw(std::span<std::uint32_t> picks, std::uint32_t limit, std::uint32_t mask);
  std::uint64_t draw_wide(std::uint64_t limit);
  template <typename T>
  void shuffle_values(std::span<T> values);

  std::array<std::uint32_t, kWords> state_;
  std::array<std::uint32_t, kWords> output_;
  std::size_t position_ = kWords;
  std::function<void()> report_;
  std::uint32_t refills_ = 0;
};

}  // namespace tessera
