#pragma once
#include <algorithm>
#include <string>
#include <vector>

namespace tessera {

/// One term of the loss of a whole batch: what was added up, and over how many.
struct LossTerm {
  std::string name;     ///< "token" of the tokens' own, or an extra loss's
  double weight = 1.0;  ///< in the loss that is trained
  double count = 0, sum = 0;

  /// 0 over nothing.
  double mean() const { return sum / std::max(count, 1.0); }
};

/// The terms together, as they are trained.
inline double total_of(const std::vector<LossTerm>& terms) {
  double total = 0;
  for (const LossTerm& term : terms) total += term.weight * term.mean();
  return total;
}

}  // namespace tessera
