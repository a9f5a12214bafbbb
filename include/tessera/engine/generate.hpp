#pragma once
/// Text generation with a KV cache.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/nn/model.hpp"

namespace tessera {

struct SamplingOptions {
  std::int64_t max_new_tokens = 100;
  double temperature = 1.0;  ///< 0 = greedy
  std::int64_t top_k = 0;    ///< keep the k likeliest tokens; 0 = off, 1 = greedy
  double top_p = 0.0;        ///< keep the likeliest tokens up to this total probability; 0 = off
  std::uint64_t seed = 0;
  std::int32_t stop_token = -1;  ///< generation ends when it is drawn; -1 = never
};

/// Errors: InvalidArgument for negative values, top_p above 1, or top_k and top_p together (as in Megatron).
void check(const SamplingOptions& options);

/// The token drawn from `logits` with random number `uniform` in [0, 1): divides by the temperature, cuts to
/// top-k or top-p (the token that crosses p stays), draws by cumulative probability. Errors: InvalidArgument
/// if a logit is not finite.
std::int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, double uniform);

/// New tokens after `prompt` (not empty), without the stop token; ends at max_new_tokens, the stop token or
/// the model's last position. The n-th draw depends on (seed, position) alone. on_token, if set, sees each
/// token as it comes and ends generation by returning false.
std::vector<std::int32_t> generate(const ExecCtx& ctx, Model& model, std::span<const std::int32_t> prompt,
                                   const SamplingOptions& options,
                                   const std::function<bool(std::int32_t)>& on_token = {});

}  // namespace tessera
