#include "base/suggest.hpp"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace tessera {

namespace {

// Longer words are garbage; comparing their beginning keeps the cost bounded.
constexpr std::size_t kLongestWord = 64;

std::string normalised(std::string_view word) {
  std::string result(word.substr(0, kLongestWord));
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-') c = '_';
  }
  return result;
}

/// Optimal string alignment distance.
int edit_distance(const std::string& a, const std::string& b) {
  const std::size_t width = b.size() + 1;
  std::vector<int> cost((a.size() + 1) * width);
  for (std::size_t i = 0; i <= a.size(); ++i) cost[i * width] = static_cast<int>(i);
  for (std::size_t j = 0; j <= b.size(); ++j) cost[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const int replace = cost[(i - 1) * width + j - 1] + (a[i - 1] != b[j - 1]);
      int best = std::min({replace, cost[(i - 1) * width + j] + 1, cost[i * width + j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        best = std::min(best, cost[(i - 2) * width + j - 2] + 1);
      }
      cost[i * width + j] = best;
    }
  }
  return cost.back();
}

}  // namespace

Suggestion nearest_name(std::string_view word, std::span<const std::string_view> candidates) {
  const std::string wanted = normalised(word);
  Suggestion best;
  for (const std::string_view candidate : candidates) {
    const std::string known = normalised(candidate);
    const int longer = std::abs(static_cast<int>(known.size()) - static_cast<int>(wanted.size()));
    if (!best.name.empty() && longer >= best.distance) continue;  // it takes a step for each letter more
    const int distance = edit_distance(wanted, known);
    if (best.name.empty() || distance < best.distance) best = {candidate, distance, false};
  }
  // "log" is short for "logging", however many letters that leaves out.
  for (const std::string_view candidate : candidates) {
    const bool abbreviated = wanted.size() >= 3 && normalised(candidate).starts_with(wanted);
    if (abbreviated && best.distance > 2)
      return {candidate, edit_distance(wanted, normalised(candidate)), true};
  }
  const int length = static_cast<int>(std::max(wanted.size(), best.name.size()));
  best.close = !best.name.empty() && best.distance <= std::max(1, length * 2 / 5);
  return best;
}

std::string suggest(std::string_view word, std::span<const std::string_view> candidates) {
  const Suggestion best = nearest_name(word, candidates);
  if (best.name.empty()) return "";
  if (best.close) return "; did you mean '" + std::string(best.name) + "'?";
  std::string text = "; the nearest is '" + std::string(best.name) + "' (known: ";
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (i > 0) text += ", ";
    text += candidates[i];
  }
  return text + ")";
}

}  // namespace tessera
