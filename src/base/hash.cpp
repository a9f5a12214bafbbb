#include "tessera/base/hash.hpp"

#include <algorithm>
#include <cstring>

namespace tessera {

namespace {

/// Every step is a bijection of the lane, so a single changed word cannot cancel out.
std::uint64_t mix(std::uint64_t lane, std::uint64_t word) {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15u;
  lane = (lane ^ word) * kFactor;
  return lane ^ (lane >> 29);
}

}  // namespace

ContentHash::ContentHash(std::uint64_t seed) : seed_(seed), lanes_{seed, seed + 1, seed + 2, seed + 3} {}

void ContentHash::add(std::span<const std::byte> piece) {
  size_ += piece.size();
  std::uint64_t lanes[4] = {lanes_[0], lanes_[1], lanes_[2], lanes_[3]};
  std::size_t i = 0;
  std::uint64_t words[4];
  for (; i + 32 <= piece.size(); i += 32) {
    std::memcpy(words, piece.data() + i, 32);
    for (int k = 0; k < 4; ++k) lanes[k] = mix(lanes[k], words[k]);
  }
  for (; i < piece.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, piece.data() + i, std::min<std::size_t>(8, piece.size() - i));
    lanes[0] = mix(lanes[0], word);
  }
  std::copy_n(lanes, 4, lanes_);
}

std::uint64_t ContentHash::value() const {
  std::uint64_t hash = mix(seed_, size_);
  for (const std::uint64_t lane : lanes_) hash = mix(mix(hash, lane), 0);
  return hash;
}

std::uint64_t content_hash(std::span<const std::byte> bytes, std::uint64_t seed) {
  ContentHash hash(seed);
  hash.add(bytes);
  return hash.value();
}

}  // namespace tessera
