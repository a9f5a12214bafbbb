#include "base/suggest.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>

namespace tessera {

namespace {

// Longer words are garbage; comparing their beginning keeps the cost bounded.
constexpr std::size_t kLongestWord = 64;
constexpr int kNoBound = 2 * kLongestWord;

std::string normalised(std::string_view word) {
  std::string result(word.substr(0, kLongestWord));
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-') c = '_';
  }
  return result;
}

/// Optimal string alignment distance of two words, or `enough` or more if it is no less than that.
int edit_distance(const std::string& a, const std::string& b, int enough) {
  std::array<int, kLongestWord + 1> before{}, last{}, cost{};  // the rows of i - 2, i - 1 and i
  for (std::size_t j = 0; j <= b.size(); ++j) cost[j] = static_cast<int>(j);
  int least_of_last = 0;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = last;
    last = cost;
    cost[0] = static_cast<int>(i);
    int least = cost[0];
    for (std::size_t j = 1; j <= b.size(); ++j) {
      int best = std::min({last[j - 1] + (a[i - 1] != b[j - 1]), last[j] + 1, cost[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        best = std::min(best, before[j - 2] + 1);
      cost[j] = best;
      least = std::min(least, best);
    }
    // Every way on leads through one of the last two rows, and costs never fall.
    if (std::min(least, least_of_last) >= enough) return enough;
    least_of_last = least;
  }
  return cost[b.size()];
}

}  // namespace

Suggestion nearest_name(std::string_view word, std::span<const std::string_view> candidates) {
  const std::string wanted = normalised(word);
  Suggestion best;
  for (const std::string_view candidate : candidates) {
    const std::string known = normalised(candidate);
    const int longer = std::abs(static_cast<int>(known.size()) - static_cast<int>(wanted.size()));
    if (!best.name.empty() && longer >= best.distance) continue;  // it takes a step for each letter more
    const int distance = edit_distance(wanted, known, best.name.empty() ? kNoBound : best.distance);
    if (best.name.empty() || distance < best.distance) best = {candidate, distance, false};
  }
  // "log" is short for "logging", however many letters that leaves out.
  if (wanted.size() >= 3 && best.distance > 2) {
    for (const std::string_view candidate : candidates) {
      const std::string known = normalised(candidate);
      if (known.starts_with(wanted)) return {candidate, edit_distance(wanted, known, kNoBound), true};
    }
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
