#pragma once
/// How likely a model holds given texts, on any layout.

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera {

class Engine;

/// tokens[first], tokens[first + 1], ... are scored, each after all tokens before it.
struct TextToScore {
  std::vector<std::int32_t> tokens;
  std::int64_t first = 1;  ///< 1 or more: nothing stands before the first token
};

struct TextScores {
  std::vector<float> logprobs = {};  ///< natural logarithms of probabilities, of the scored tokens
  /// Whether every scored token is the likeliest one in its place (of equally likely ones the first). Only
  /// where ScoreOptions::likeliest asks for it.
  bool likeliest = false;
};

struct ScoreOptions {
  bool likeliest = false;  ///< costs the logits of all positions
  /// Told how many texts are done, on every rank.
  std::function<void(std::int64_t done)> on_progress = {};
};

/// Element i belongs to texts[i]. Dropout is off and nothing is recorded; weights, gradients and the numbers
/// of samples stay as they are. Collective over the engine's world: every rank comes with the same texts,
/// data ranks share them out, and every rank gets all scores. Errors, on every rank: InvalidArgument for a
/// text without a token to score, one longer than the model's positions (its last token needs none), a token
/// outside the vocabulary, ranks that came with different texts, a model that looks to both sides;
/// TrainingError for a log-probability that is not a number.
std::vector<TextScores> score_texts(Engine& engine, const std::vector<TextToScore>& texts,
                                    const ScoreOptions& options = {});

}  // namespace tessera
