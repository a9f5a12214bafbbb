#pragma once
/// How a text's next token is drawn, as host and device know it.

#include <cstdint>

#include "tessera/base/philox.hpp"

namespace tessera {

/// How the next token of a text is drawn, and where the text stands. It lies on the device and moves on with
/// every token.
struct SamplingRow {
  std::uint64_t seed = 0, sample = 0;  ///< with the position they key the random number
  std::int64_t position = 0;           ///< of the token that is drawn
  std::int64_t new_tokens = 0;         ///< before it
  std::int64_t min_new_tokens = 0;     ///< no stop token before there are so many
  std::int64_t top_k = 0;              ///< the k likeliest tokens; 0 = all, 1 = greedy
  double temperature = 1.0;            ///< above 0
  double top_p = 0.0;                  ///< of these, the likeliest up to this total probability; 0 = off
  double top_p_decay = 1.0, top_p_bound = 0.0;  ///< it is multiplied by the first, down to the second
  float repetition_penalty = 1.0f;
  std::int32_t logprob = 0;  ///< whether the token's log-probability is told
};

/// What became of a row.
struct DrawnToken {
  enum Failure : std::int32_t { none, not_finite, no_token_left };
  std::int32_t token = 0;
  std::int32_t failure = none;
  float logprob = 0.0f;
};

/// Which use of randomness it is.
inline constexpr std::uint32_t kSamplingSite = site_of("generate");

/// The random number in [0, 1) of the token at `position` of text number `sample`.
TESSERA_INLINE double sampling_uniform(std::uint64_t seed, std::uint64_t sample, std::int64_t position) {
  const std::uint64_t index = (sample << 32) + static_cast<std::uint64_t>(position);
  const PhiloxBlock block = random_block({seed, kSamplingSite, 0}, index);
  const std::uint64_t bits = (std::uint64_t{block.word[0]} << 21) ^ (block.word[1] >> 11);
  return static_cast<double>(bits & ((std::uint64_t{1} << 53) - 1)) * 0x1p-53;
}

}  // namespace tessera
