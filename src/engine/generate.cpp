#include "tessera/engine/generate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/engine/engine.hpp"

namespace tessera {
namespace {

/// Logits of the last position after feeding `tokens`, which come after what the cache holds.
std::vector<float> feed(const ExecCtx& ctx, Model& model, std::span<const std::int32_t> tokens,
                        KvCache& cache) {
  Batch batch;
  batch.batch = 1;
  batch.seq_length = static_cast<std::int64_t>(tokens.size());
  batch.tokens.assign(tokens.begin(), tokens.end());
  for (std::int64_t i = 0; i < batch.seq_length; ++i) {
    batch.position_ids.push_back(static_cast<std::int32_t>(cache.length + i));
  }
  const MicroBatch input = to_micro_batch(ctx, batch);
  const Var logits = model.forward({.exec = ctx, .input = input, .cache = &cache});
  cache.length += batch.seq_length;
  ctx.stream->synchronize();
  const Tensor& rows = logits.value();
  return rows.narrow(0, rows.size(0) - 1, 1).to_floats();
}

double uniform_at(std::uint64_t seed, std::int64_t position) {
  const PhiloxBlock block =
      random_block({seed, site_of("generate"), 0}, static_cast<std::uint64_t>(position));
  const std::uint64_t bits = (std::uint64_t{block.word[0]} << 21) ^ (block.word[1] >> 11);
  return static_cast<double>(bits & ((std::uint64_t{1} << 53) - 1)) * 0x1p-53;
}

}  // namespace

void check(const SamplingOptions& o) {
  TESSERA_CHECK(o.max_new_tokens >= 0, "max_new_tokens is negative: ", o.max_new_tokens);
  TESSERA_CHECK(o.temperature >= 0.0 && std::isfinite(o.temperature),
                "temperature must be 0 (greedy) or above, not ", o.temperature);
  TESSERA_CHECK(o.top_k >= 0, "top_k must be 0 (off) or above, not ", o.top_k);
  TESSERA_CHECK(o.top_p >= 0.0 && o.top_p <= 1.0, "top_p must lie in [0, 1], not ", o.top_p);
  TESSERA_CHECK(o.top_k == 0 || o.top_p == 0.0, "top_k and top_p cannot be used together: choose one");
}

std::int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, double uniform) {
  TESSERA_CHECK(
      !logits.empty() && std::all_of(logits.begin(), logits.end(), [](float v) { return std::isfinite(v); }),
      "the logits of ", logits.size(),
      " tokens are not finite: the weights are damaged or training diverged");
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const float la = logits[static_cast<std::size_t>(a)], lb = logits[static_cast<std::size_t>(b)];
    return la != lb ? la > lb : a < b;
  };
  if (options.temperature == 0.0 || options.top_k == 1)
    return *std::min_element(order.begin(), order.end(), likelier);
  std::sort(order.begin(), order.end(), likelier);
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(options.top_k)));
  std::vector<double> weight;
  const double top = logits[static_cast<std::size_t>(order[0])];
  for (const std::int32_t token : order) {
    weight.push_back(std::exp((logits[static_cast<std::size_t>(token)] - top) / options.temperature));
  }
  double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  if (options.top_p > 0.0) {
    double kept = 0.0;
    std::size_t n = 0;
    while (n < weight.size() && kept < options.top_p * total) kept += weight[n++];
    weight.resize(std::max<std::size_t>(n, 1));
    total = std::accumulate(weight.begin(), weight.end(), 0.0);
  }
  double mark = uniform * total;
  for (std::size_t i = 0; i < weight.size(); ++i) {
    mark -= weight[i];
    if (mark < 0.0) return order[i];
  }
  return order[weight.size() - 1];
}

std::vector<std::int32_t> generate(const ExecCtx& ctx, Model& model, std::span<const std::int32_t> prompt,
                                   const SamplingOptions& options,
                                   const std::function<bool(std::int32_t)>& on_token) {
  check(options);
  const auto length = static_cast<std::int64_t>(prompt.size());
  TESSERA_CHECK(length > 0, "generation needs at least one token to begin with");
  TESSERA_CHECK(length <= model.max_positions(), "a prompt of ", length,
                " tokens is longer than the model's ", model.max_positions(), " positions");
  for (const std::int32_t token : prompt) {
    TESSERA_CHECK(token >= 0 && token < model.vocab_size(), "token ", token,
                  " of the prompt is outside the vocabulary of ", model.vocab_size());
  }
  const std::int64_t last = length + std::min(model.max_positions() - length, options.max_new_tokens);
  KvCache cache = model.make_cache(ctx, 1, last);
  std::vector<std::int32_t> generated;
  std::vector<std::int32_t> pending(prompt.begin(), prompt.end());
  for (std::int64_t position = length; position < last; ++position) {
    const std::vector<float> logits = feed(ctx, model, pending, cache);
    const std::int32_t token = sample_token(logits, options, uniform_at(options.seed, position));
    if (token == options.stop_token) break;
    generated.push_back(token);
    if (on_token && !on_token(token)) break;
    pending.assign(1, token);
  }
  return generated;
}

}  // namespace tessera
