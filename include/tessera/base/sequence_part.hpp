#pragma once
/// How context ranks share the positions of a sample.

#include <cstdint>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera {

/// Samples are cut into 2 x ranks chunks, equally long. Rank r holds chunk r and the one as far from the end:
/// under a causal mask all ranks then compare as many queries with keys.
struct SequencePart {
  std::int64_t length = 0;  ///< positions of a whole sample
  int ranks = 1, rank = 0;

  /// Neighbouring positions, where they stand among those held and in the sample.
  struct Run {
    std::int64_t held = 0, whole = 0, count = 0;
  };
  /// What `of` holds, in order. Errors: InvalidArgument unless 2 x ranks, above one rank, divides the length.
  std::vector<Run> runs(int of) const {
    if (ranks == 1) return {{0, 0, length}};
    TESSERA_CHECK(length % (2 * ranks) == 0, "a sequence of ", length, " positions cannot be shared by ",
                  ranks, " context ranks: its length must be a multiple of ", 2 * ranks,
                  " (2 x parallel.context); pad or cut the samples");
    const std::int64_t chunk = length / (2 * ranks);
    return {{0, of * chunk, chunk}, {chunk, (2 * ranks - 1 - of) * chunk, chunk}};
  }
  std::vector<Run> runs() const { return runs(rank); }
  std::int64_t held() const { return length / ranks; }
};

}  // namespace tessera
