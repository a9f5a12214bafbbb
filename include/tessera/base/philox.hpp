#pragma once
/// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a counter-based
/// generator, so that a value depends on its key and index alone, never on who draws it or when.

#include <array>
#include <cstdint>
#include <string_view>

#include "tessera/base/dtype.hpp"

namespace tessera {

struct PhiloxBlock {
  std::uint32_t word[4];
};

/// Ten rounds over a 128-bit counter and a 64-bit key.
TESSERA_INLINE PhiloxBlock philox4x32(PhiloxBlock counter, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter.word[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<std::uint32_t>(p1 >> 32) ^ counter.word[1] ^ key0, static_cast<std::uint32_t>(p1),
                static_cast<std::uint32_t>(p0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<std::uint32_t>(p0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/// What a random stream is keyed by, besides the element index: (seed, site, step).
struct RngKey {
  std::uint64_t seed = 0;
  std::uint32_t site = 0;  ///< which use of randomness: hash of a parameter's or module's name
  std::uint32_t step = 0;  ///< training step; 0 for initialisation
  /// Not null: where kernels on CUDA find the step instead, in the device's memory. So a graph that was
  /// recorded in one step serves the next.
  const std::uint32_t* step_at = nullptr;
};

/// The four words numbered 4*block .. 4*block+3 of a stream.
TESSERA_INLINE PhiloxBlock random_block(const RngKey& key, std::uint64_t block) {
  return philox4x32(
      {{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), key.site, key.step}},
      static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32));
}

/// FNV-1a hash of a name: the site of a random stream.
constexpr std::uint32_t site_of(std::string_view name) {
  std::uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

/// Dropout over a matrix of rows x features, numbered globally (law 1): element (row, f) is dropped when word
/// f % 4 of block `row * ceil(features / 4) + f / 4` is below `threshold`. A row stands for one (sample,
/// position) of the global batch, whatever rank or micro-batch computes it.
struct DropoutSpec {
  RngKey key = {};
  float probability = 0.0f;  ///< 0 = no dropout
  std::int64_t batch = 1;  ///< rows run position-major: local row r = (position r / batch, sample r % batch)
  std::int64_t sample0 = 0;    ///< global number of local sample 0
  std::int64_t position0 = 0;  ///< number of local position 0 among those held
  /// The global number of a position held: plus `before` up to position `turn`, plus `behind` from there on.
  std::int64_t turn = 0, before = 0, behind = 0;
  std::int64_t seq_length = 1;  ///< positions per sample
  /// The matrix has features feature0 (a multiple of 4) and following of so many; 0 = all there are.
  std::int64_t feature0 = 0, features = 0;

  TESSERA_INLINE bool active() const { return probability > 0.0f; }
  TESSERA_INLINE std::uint32_t threshold() const {
    const double t = static_cast<double>(probability) * 4294967296.0;
    return t >= 4294967295.0 ? 0xffffffffu : static_cast<std::uint32_t>(t);
  }
  TESSERA_INLINE float scale() const { return 1.0f / (1.0f - probability); }
  /// Global row of local row r.
  TESSERA_INLINE std::uint64_t row(std::int64_t r) const {
    const std::int64_t held = position0 + r / batch;
    return static_cast<std::uint64_t>((sample0 + r % batch) * seq_length + held +
                                      (held < turn ? before : behind));
  }
  /// Block of the first feature of local row r, of a matrix of `columns`.
  TESSERA_INLINE std::uint64_t first_block(std::int64_t r, std::int64_t columns) const {
    const std::int64_t whole = features > 0 ? features : columns;
    return row(r) * static_cast<std::uint64_t>((whole + 3) / 4) + static_cast<std::uint64_t>(feature0 / 4);
  }
};

}  // namespace tessera
