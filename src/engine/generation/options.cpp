#include <cmath>

#include "engine/generation/candidates.hpp"
#include "tessera/base/sampling.hpp"
#include "tessera/engine/generate.hpp"

namespace tessera {
namespace {

void check_beams(const GenerationOptions& o) {
  TESSERA_CHECK(o.num_beams >= 1, "num_beams must be 1 (none) or more, not ", o.num_beams);
  TESSERA_CHECK(o.num_return >= 1 && o.num_return <= o.num_beams, "num_return (", o.num_return,
                ") is at least 1 and at most num_beams (", o.num_beams, ")");
  TESSERA_CHECK(std::isfinite(o.length_penalty), "length_penalty must be finite, not ", o.length_penalty);
  if (o.num_beams == 1) return;
  TESSERA_CHECK(o.num_samples == 1, "a beam search has num_return texts of a prompt, not num_samples (",
                o.num_samples, ")");
  TESSERA_CHECK(!o.logprobs && !o.on_token, "logprobs and on_token go with drawn texts, not with beams");
}

}  // namespace

void check(const GenerationOptions& o) {
  TESSERA_CHECK(o.max_new_tokens >= 0, "max_new_tokens is negative: ", o.max_new_tokens);
  TESSERA_CHECK(o.max_length >= 0, "max_length is negative: ", o.max_length);
  TESSERA_CHECK(o.min_new_tokens >= 0, "min_new_tokens is negative: ", o.min_new_tokens);
  TESSERA_CHECK(o.min_new_tokens <= o.max_new_tokens, "min_new_tokens (", o.min_new_tokens,
                ") is above max_new_tokens (", o.max_new_tokens, ")");
  TESSERA_CHECK(o.temperature >= 0.0 && std::isfinite(o.temperature),
                "temperature must be 0 (greedy) or above, not ", o.temperature);
  TESSERA_CHECK(o.top_k >= 0, "top_k must be 0 (off) or above, not ", o.top_k);
  const auto share = [](double value, const char* name) {
    TESSERA_CHECK(value >= 0.0 && value <= 1.0, name, " must lie in [0, 1], not ", value);
  };
  share(o.top_p, "top_p");
  share(o.top_p_decay, "top_p_decay");
  share(o.top_p_bound, "top_p_bound");
  TESSERA_CHECK(o.top_p_decay == 0.0 || o.top_p > 0.0, "top_p_decay (", o.top_p_decay, ") needs a top_p");
  TESSERA_CHECK(o.top_p_bound <= o.top_p || o.top_p_decay == 0.0, "top_p_bound (", o.top_p_bound,
                ") is above top_p (", o.top_p, ")");
  TESSERA_CHECK(o.repetition_penalty > 0.0 && std::isfinite(o.repetition_penalty),
                "repetition_penalty must be above 0, not ", o.repetition_penalty);
  TESSERA_CHECK(o.num_samples >= 1, "num_samples must be 1 or more, not ", o.num_samples);
  TESSERA_CHECK(o.batch_size >= 0, "batch_size must be 0 (all at once) or above, not ", o.batch_size);
  TESSERA_CHECK(o.prefill_chunk >= 1, "prefill_chunk must be 1 or more, not ", o.prefill_chunk);
  TESSERA_CHECK(!o.prompt_logprobs || o.logprobs, "prompt_logprobs go with logprobs");
  TESSERA_CHECK(o.top_logprobs >= 0, "top_logprobs must be 0 (none) or above, not ", o.top_logprobs);
  TESSERA_CHECK(o.top_logprobs == 0 || o.logprobs, "top_logprobs go with logprobs");
  check_beams(o);
}

std::int32_t sample_token(std::span<const float> logits, const GenerationOptions& options, double uniform) {
  using namespace generation;
  TESSERA_CHECK(!logits.empty() && extent_of(logits).sound, "the logits of ", logits.size(),
                " tokens are not finite: the weights are damaged or training diverged");
  const double temperature = options.temperature == 0.0 || options.top_k == 1 ? 1.0 : options.temperature;
  std::vector<Candidate> best;
  const bool greedy = options.temperature == 0.0 || options.top_k == 1;
  if (!greedy && options.top_k == 0) {
    if (options.top_p == 0.0) return draw(logits, temperature, uniform);
    select_share(logits, temperature, options.top_p, best);
    return draw(best, temperature, uniform);
  }
  select(logits, 0, greedy ? 1 : static_cast<std::size_t>(options.top_k), best);
  if (options.top_p > 0.0) cut_to_share(best, temperature, options.top_p);
  return draw(best, temperature, uniform);
}

double uniform_at(std::uint64_t seed, std::uint64_t sample, std::int64_t position) {
  return sampling_uniform(seed, sample, position);
}

}  // namespace tessera
