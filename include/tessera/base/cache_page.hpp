#pragma once
/// The unit in which the key-value cache of generation gives memory to texts.

#include <cstdint>

namespace tessera {

/// Positions that a page of the cache holds.
inline constexpr std::int64_t kCachePage = 64;

/// Pages that hold so many positions.
constexpr std::int64_t cache_pages(std::int64_t positions) {
  return (positions + kCachePage - 1) / kCachePage;
}

}  // namespace tessera
