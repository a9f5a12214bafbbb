#pragma once
/// Text generation with a KV cache, on any layout.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/device/graph.hpp"
#include "tessera/nn/model.hpp"

namespace tessera {

class Engine;

/// When a beam search ends. never: when no open beam can become better than the worst finished one, at
/// whatever length; no: at its present length; yes: as soon as there are num_beams finished ones.
enum class EarlyStopping { no, yes, never };

/// Whose rules a beam search follows: Transformers' (5.x), or those of Megatron-LM's beam_search, whose
/// hypotheses leave the stop token out, and which ends when the worst kept one is no worse than the best
/// candidate of a step.
enum class BeamRule { transformers, megatron };

struct GenerationOptions {
  std::int64_t max_new_tokens = 100;
  std::int64_t max_length = 0;  ///< of a text, prompt included; 0 = as long as the model's positions
  /// What the texts of a model with an encoder, which reads the prompts, begin with (T5's padding). It counts
  /// for max_length, where the prompt does not.
  std::int32_t decoder_start = 0;
  std::int64_t min_new_tokens = 0;  ///< no stop token is drawn before there are so many
  double temperature = 1.0;         ///< 0 = greedy
  std::int64_t top_k = 0;           ///< keep the k likeliest tokens; 0 = off, 1 = greedy
  double top_p = 0.0;               ///< of these, the likeliest up to this total probability; 0 = off
  /// top_p is multiplied by this after each new token of a text, down to top_p_bound; 0 = off.
  double top_p_decay = 0.0, top_p_bound = 0.0;
  double repetition_penalty = 1.0;  ///< Keskar et al., "CTRL": logits of tokens the text has; 1 = off
  std::uint64_t seed = 0;
  std::uint64_t first_sample =
      0;  ///< number of the first text: what it draws depends on (seed, number, position)
  std::int64_t num_samples = 1;                ///< texts drawn for each prompt
  std::vector<std::int32_t> stop_tokens = {};  ///< a text ends with any of them
  /// Asked after each new token with the text's new tokens: whether it ends there. On one rank of each data
  /// rank; must depend on its argument alone.
  std::function<bool(std::span<const std::int32_t>)> stop = {};
  /// Told of each new token as it is known, on the ranks that compute the prompt: prompt, sample, token. Not
  /// with beams.
  std::function<void(std::int64_t, std::int64_t, std::int32_t)> on_token = {};
  bool logprobs = false;  ///< natural logarithms of the probabilities that the model gave each new token
  /// With logprobs, of a decoder: those of the prompt's tokens behind the first come before them. With
  /// max_new_tokens 0 these are all.
  bool prompt_logprobs = false;
  /// With logprobs: beside each of them the tokens that were likeliest there, so many.
  std::int64_t top_logprobs = 0;

  std::int64_t num_beams =
      1;  ///< above 1: beam search instead of drawing; temperature, top_k, top_p are unused
  std::int64_t num_return = 1;  ///< the best so many of num_beams
  double length_penalty = 1.0;  ///< a score is the sum of log-probabilities / new tokens ^ length_penalty
  EarlyStopping early_stopping = EarlyStopping::no;
  BeamRule beam_rule = BeamRule::transformers;

  /// Texts (with their beams) computed at once by a data rank; others wait until one of them ends. 0 = all.
  std::int64_t batch_size = 0;
  std::int64_t prefill_chunk = 512;  ///< positions of a prompt computed at once
};

/// Errors: InvalidArgument for options out of range, or that do not go together, by name.
void check(const GenerationOptions& options);

struct TokenLogprob {
  std::int32_t token = 0;
  float logprob = 0;
};

struct GeneratedText {
  std::vector<std::int32_t>
      tokens;  ///< new ones, with the stop token if that ended it (beam_rule megatron: without)
  std::vector<float> logprobs = {};  ///< of these, where asked for, and before them the prompt's
  std::vector<std::vector<TokenLogprob>> top_logprobs = {};  ///< of each of these, the likeliest first
  double score = 0;                                          ///< of a beam search
  bool stopped = false;                                      ///< by a stop token or `stop`, not by its length
};

/// What becomes of one prompt: num_samples or num_return texts, the best first.
using Generated = std::vector<GeneratedText>;

/// The token drawn from `logits` with random number `uniform` in [0, 1): divides by the temperature, cuts to
/// the top_k and of these to top_p (the token that crosses p stays; of equal logits the lower token comes
/// first), then walks the tokens that are left in the vocabulary's order until their cumulative probability
/// passes `uniform`. Errors: InvalidArgument if a logit is not a number, or none is above -inf.
std::int32_t sample_token(std::span<const float> logits, const GenerationOptions& options, double uniform);

/// The random number in [0, 1) of the token at `position` of text number `sample`.
double uniform_at(std::uint64_t seed, std::uint64_t sample, std::int64_t position);

/// Writes texts with a model. Every rank of the engine's world calls the same members with the same
/// arguments; data ranks share out the prompts, tensor ranks and pipeline stages work together as in
/// training, and every rank gets all texts. Sequence parallelism and recomputation rest meanwhile.
class Generator {
 public:
  /// Collective over the engine's world. The engine must outlive it.
  explicit Generator(Engine& engine);
  /// Alone, with a whole model; both must outlive it.
  Generator(const ExecCtx& ctx, Model& model);
  ~Generator();
  Generator(Generator&&) noexcept;

  /// Element i belongs to prompts[i], which the text continues, or which an encoder reads. A text ends at
  /// max_new_tokens, where it is told to stop, or at the model's last position. Errors, on every rank:
  /// InvalidArgument for options or prompts that cannot be (no tokens, too many, a token outside the
  /// vocabulary), ranks that came with different ones, logits that are not finite.
  std::vector<Generated> run(const std::vector<std::vector<std::int32_t>>& prompts,
                             const GenerationOptions& options);

  /// How the decoding passes of the last run were launched: as graphs on a GPU that holds the whole model.
  /// Else zeros.
  const StreamGraph::Stats& graph() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
