#pragma once
/// The likeliest tokens of a row of logits.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace tessera::generation {

/// The score of what may not be drawn.
inline constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Candidate {
  float score = 0;  ///< after penalties
  float raw = 0;    ///< as the model gave it
  std::int32_t token = 0;
};

/// Likelier first; of equal ones the lower token.
inline bool likelier(const Candidate& a, const Candidate& b) {
  return a.score != b.score ? a.score > b.score : a.token < b.token;
}

/// What is largest in a row, and whether all of it is finite or -inf.
struct Extent {
  float largest = 0;
  bool sound = true;
};
Extent extent_of(std::span<const float> row);

/// Sum of exp(x - largest).
double exp_sum(std::span<const float> row, float largest);

/// The k likeliest of `scores`, the first of which is of token `first`, likeliest first; tokens of -inf are
/// none. `best` is written over, and keeps its memory.
void select(std::span<const float> scores, std::int32_t first, std::size_t k, std::vector<Candidate>& best);

/// The likeliest tokens of a row that together have at least `share` of the sum of exp((x - largest) /
/// temperature).
void select_share(std::span<const float> scores, double temperature, double share,
                  std::vector<Candidate>& best);

/// Cuts candidates, likeliest first, to those that together have at least `share` of their own sum.
void cut_to_share(std::vector<Candidate>& best, double temperature, double share);

/// The token at which the cumulative weight, in the vocabulary's order, passes `uniform` of the whole. The
/// candidates' order changes.
std::int32_t draw(std::vector<Candidate>& from, double temperature, double uniform);
/// The same from all tokens.
std::int32_t draw(std::span<const float> scores, double temperature, double uniform);

}  // namespace tessera::generation
