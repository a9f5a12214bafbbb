#pragma once
/// Consecutive elements, rows or samples.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera {

struct Range {
  std::int64_t begin = 0, count = 0;
  std::int64_t end() const { return begin + count; }
  friend bool operator==(const Range&, const Range&) = default;
};

/// What two ranges have in common; {b.begin, 0} if nothing.
inline Range overlap(const Range& a, const Range& b) {
  const std::int64_t begin = std::max(a.begin, b.begin), end = std::min(a.end(), b.end());
  return begin < end ? Range{begin, end - begin} : Range{b.begin, 0};
}

/// Appends `next`, or makes the last range longer if `next` begins where it ends. Empty ones are left out.
inline void append(std::vector<Range>& ranges, const Range& next) {
  if (next.count <= 0) return;
  if (!ranges.empty() && ranges.back().end() == next.begin) {
    ranges.back().count += next.count;
  } else {
    ranges.push_back(next);
  }
}

}  // namespace tessera
