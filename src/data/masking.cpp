#include "tessera/data/masking.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/base/error.hpp"
#include "tessera/data/split.hpp"

namespace tessera {
namespace {

constexpr double kGeometric = 0.2;  // SpanBERT

/// Probabilities of runs of 1, 2, ... words. Near the end of a sample, where fewer words are left, Megatron
/// draws from all of them too, and takes what there is.
std::vector<double> run_lengths(const MaskingOptions& options) {
  std::vector<double> weights(static_cast<std::size_t>(options.max_ngram));
  for (std::size_t n = 0; n < weights.size(); ++n) weights[n] = 1.0 / static_cast<double>(n + 1);
  weights = normalized(weights);
  if (options.longer_ngrams) std::ranges::reverse(weights);
  return normalized(weights);
}

}  // namespace

std::span<const std::int32_t> Words::run(std::int32_t word, std::int64_t n) const {
  const auto last = static_cast<std::size_t>(std::min<std::int64_t>(word + n, count()));
  const std::int32_t begin = begins[static_cast<std::size_t>(word)];
  return std::span(positions).subspan(static_cast<std::size_t>(begin),
                                      static_cast<std::size_t>(begins[last] - begin));
}

Words find_words(std::span<const std::int32_t> tokens, const SpecialTokens& special,
                 const std::vector<bool>& continues, bool whole_words) {
  Words words;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == special.cls || tokens[i] == special.sep) continue;
    const auto id = static_cast<std::size_t>(tokens[i]);
    words.positions.push_back(static_cast<std::int32_t>(i));
    const bool joins = whole_words && words.count() > 0 && id < continues.size() && continues[id];
    if (!joins) words.begins.push_back(0);
    words.begins.back() = static_cast<std::int32_t>(words.positions.size());
  }
  return words;
}

double mask_budget(std::int64_t length, std::int64_t target_length, double mask_prob) {
  const double rounded =
      std::nearbyint(static_cast<double>(length) * mask_prob);  // halves to even, as Python
  return std::min(mask_prob * static_cast<double>(target_length), std::max(1.0, rounded));
}

void choose_runs(const Words& words, double budget, const MaskingOptions& options, NumpyRandom& random,
                 const std::function<void(std::span<const std::int32_t>)>& mask) {
  const std::vector<double> lengths = run_lengths(options);
  std::vector<std::int32_t> order(static_cast<std::size_t>(words.count()));
  std::iota(order.begin(), order.end(), 0);
  random.shuffle(std::span(order));
  std::vector<bool> masked(words.positions.empty() ? 0
                                                   : static_cast<std::size_t>(words.positions.back()) + 1);
  const auto is_masked = [&](std::int32_t position) { return masked[static_cast<std::size_t>(position)]; };
  std::size_t done = 0;
  const auto fits = [&](std::size_t more) { return budget >= static_cast<double>(done + more); };
  for (const std::int32_t word : order) {
    if (static_cast<double>(done) >= budget) break;
    std::int64_t n = options.geometric ? std::min(random.geometric(kGeometric), options.max_ngram)
                                       : 1 + random.choice(lengths);
    while (n > 1 && !fits(words.run(word, n).size())) --n;
    const auto run = words.run(word, n);
    if (!fits(run.size()) || std::ranges::any_of(run, is_masked)) continue;
    for (const std::int32_t position : run) masked[static_cast<std::size_t>(position)] = true;
    mask(run);
    done += run.size();
  }
  random.shuffle(std::span(order));
}

}  // namespace tessera
