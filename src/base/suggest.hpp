#pragma once
/// "Did you mean": the nearest name by edit distance.

#include <span>
#include <string>
#include <string_view>

namespace tessera {

struct Suggestion {
  std::string_view name;  ///< empty if there were no candidates
  int distance = 0;       ///< insertions, deletions, replacements and swaps of neighbours
  bool close = false;     ///< few enough edits to be a slip of the keyboard
};

/// The candidate nearest to `word`, the first of equals; letter case and '-' for '_' cost nothing.
Suggestion nearest_name(std::string_view word, std::span<const std::string_view> candidates);

/// "; did you mean 'x'?" for a close candidate, else "; the nearest is 'x' (known: a, b, x)".
std::string suggest(std::string_view word, std::span<const std::string_view> candidates);

}  // namespace tessera
