#pragma once
/// A hash for telling contents apart, not against malice.

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

/// 64 bits that differ where `bytes` or `seed` differ; any single changed 8-byte word changes it for certain.
/// Files hold these values, so they stay as they are.
std::uint64_t content_hash(std::span<const std::byte> bytes, std::uint64_t seed = 0);

/// The same of bytes that come in pieces.
class ContentHash {
 public:
  explicit ContentHash(std::uint64_t seed = 0);
  /// The size of every piece but the last is a multiple of 32.
  void add(std::span<const std::byte> piece);
  std::uint64_t value() const;

 private:
  std::uint64_t seed_;
  std::uint64_t lanes_[4];
  std::uint64_t size_ = 0;
};

}  // namespace tessera
