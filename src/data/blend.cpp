#include "tessera/data/blend.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

std::optional<double> number(const std::string& word) {
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size()) return std::nullopt;
  return value;
}

/// The greedy draw, over members that still have samples (`left`), until `size` draws are made.
BlendIndices draw(std::span<const double> weights, std::int64_t size, std::vector<std::int64_t> left) {
  TESSERA_CHECK(!weights.empty() && weights.size() <= std::numeric_limits<std::int16_t>::max(),
                weights.size(), " datasets in a blend");
  TESSERA_CHECK(size >= 0, size, " samples in a blend");
  BlendIndices out;
  out.dataset.resize(static_cast<std::size_t>(size));
  out.sample.resize(static_cast<std::size_t>(size));
  std::vector<std::int64_t> count(weights.size(), 0);
  for (std::int64_t i = 0; i < size; ++i) {
    const double turn = std::max(static_cast<double>(i), 1.0);
    std::size_t best = 0;
    double most = std::numeric_limits<double>::lowest();
    for (std::size_t d = 0; d < weights.size(); ++d) {
      const double behind = weights[d] * turn - static_cast<double>(count[d]);
      if (left[d] > 0 && behind > most) {
        most = behind;
        best = d;
      }
    }
    out.dataset[static_cast<std::size_t>(i)] = static_cast<std::int16_t>(best);
    out.sample[static_cast<std::size_t>(i)] = count[best]++;
    --left[best];
  }
  return out;
}

}  // namespace

BlendIndices blend_indices(std::span<const double> weights, std::int64_t size) {
  return draw(weights, size,
              std::vector<std::int64_t>(weights.size(), std::numeric_limits<std::int64_t>::max()));
}

BlendIndices exhaustive_blend_indices(std::span<const std::int64_t> sizes) {
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) {
    TESSERA_CHECK(size >= 0, "a dataset of ", size, " samples");
    total += size;
  }
  std::vector<double> weights(sizes.size());
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    weights[d] = static_cast<double>(sizes[d]) / static_cast<double>(std::max<std::int64_t>(total, 1));
  }
  return draw(weights, total, {sizes.begin(), sizes.end()});
}

std::int64_t blend_target(std::int64_t samples, double weight) {
  return static_cast<std::int64_t>(std::ceil(static_cast<double>(samples) * weight));
}

std::int64_t blend_request(std::int64_t samples, double weight) {
  return static_cast<std::int64_t>(
      std::ceil(static_cast<double>(blend_target(samples, weight)) * (1 + 0.005)));
}

std::vector<BlendMember> parse_blend(std::span<const std::string> words) {
  TESSERA_ENSURE(ConfigError, !words.empty(), "no dataset path is given");
  bool weighted = words.size() % 2 == 0;
  std::size_t numbers = 0;
  for (std::size_t i = 0; weighted && i < words.size(); i += 2)
    numbers += number(words[i]).has_value() ? 1 : 0;
  weighted = weighted && numbers > 0;
  std::vector<BlendMember> members;
  if (!weighted) {
    for (const std::string& word : words) members.push_back({std::nullopt, word});
    return members;
  }
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const auto weight = number(words[i]);
    TESSERA_ENSURE(ConfigError, weight && std::isfinite(*weight) && *weight >= 0, "blend: \"", words[i],
                   "\" before \"", words[i + 1], "\" is not a weight; give every path a weight or none");
    members.push_back({weight, words[i + 1]});
  }
  return members;
}

}  // namespace tessera
