#pragma once
/// A text under way, or the beams of one search.

#include <cstdint>
#include <vector>

#include "tessera/engine/generate.hpp"

namespace tessera::generation {

/// A finished text of a beam search.
struct Hypothesis {
  double score = 0;
  GeneratedText text;
};

struct Unit {
  const GenerationOptions* options = nullptr;
  std::int64_t prompt = 0, sample = 0;  ///< place among this data rank's prompts, and among its samples
  std::uint64_t number = 0;             ///< of the text, over all prompts and calls
  const std::vector<std::int32_t>* tokens = nullptr;  ///< what the text begins with: the prompt, or
  const std::vector<std::int32_t>* encoded =
      nullptr;                ///< where an encoder reads that, the token to start with
  std::int64_t most_new = 0;  ///< tokens it may get
  std::int64_t length = 0;    ///< positions in the cache
  bool done = false;
  std::vector<std::vector<std::int32_t>> text;  ///< by row: new tokens; the last one is not in the cache yet

  // Where tokens are drawn:
  std::vector<std::vector<float>> logprobs;  ///< by row
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> likeliest, prompt_likeliest;  ///< beside each of these
  std::vector<double> sums;                                            ///< by beam: log-probabilities
  std::vector<Hypothesis> finished;                                    ///< the best first
  bool can_improve = true;                                             ///< beam_rule transformers
  bool stopped = false;

  std::int64_t new_tokens() const { return static_cast<std::int64_t>(text[0].size()); }
};

/// A token of a prompt whose probability is asked for, for all its samples.
struct Scored {
  std::int32_t token = 0;
  std::vector<Unit*> units;
};

/// What was drawn for a unit: a token for each of its rows, and which row's text it continues.
struct Choice {
  bool done = false;
  std::vector<std::int32_t> tokens, parents;
};

}  // namespace tessera::generation
