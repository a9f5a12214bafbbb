#include "tessera/base/hash.hpp"

#include <algorithm>
#include <cstring>

namespace tessera {

std::uint64_t content_hash(std::span<const std::byte> bytes, std::uint64_t seed) {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15u;
  // Every step is a bijection of the lane, so a single changed word cannot cancel out.
  const auto mix = [](std::uint64_t lane, std::uint64_t word) {
    lane = (lane ^ word) * kFactor;
    return lane ^ (lane >> 29);
  };
  std::uint64_t lanes[4] = {seed, seed + 1, seed + 2, seed + 3};
  std::size_t i = 0;
  std::uint64_t words[4];
  for (; i + 32 <= bytes.size(); i += 32) {
    std::memcpy(words, bytes.data() + i, 32);
    for (int k = 0; k < 4; ++k) lanes[k] = mix(lanes[k], words[k]);
  }
  for (; i < bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min<std::size_t>(8, bytes.size() - i));
    lanes[0] = mix(lanes[0], word);
  }
  std::uint64_t hash = mix(seed, bytes.size());
  for (const std::uint64_t lane : lanes) hash = mix(mix(hash, lane), 0);
  return hash;
}

}  // namespace tessera
