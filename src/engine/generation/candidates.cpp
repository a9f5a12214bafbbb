#include "engine/generation/candidates.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/base/error.hpp"

namespace tessera::generation {
namespace {

/// Compilers keep this many maxima in registers, as the order of a reduction is theirs to keep otherwise.
constexpr std::size_t kLanes = 16;

double weight(float score, float largest, double temperature) {
  return std::exp((static_cast<double>(score) - static_cast<double>(largest)) / temperature);
}

float largest_of(const std::vector<Candidate>& from) {
  float largest = kNone;
  for (const Candidate& each : from) largest = std::max(largest, each.score);
  return largest;
}

}  // namespace

Extent extent_of(std::span<const float> row) {
  float largest[kLanes];
  int unsound[kLanes] = {};
  std::fill_n(largest, kLanes, kNone);
  const std::size_t whole = row.size() / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float x = row[i + lane];
      largest[lane] = x > largest[lane] ? x : largest[lane];
      unsound[lane] |= static_cast<int>(!(x <= std::numeric_limits<float>::max()));
    }
  }
  for (std::size_t i = whole; i < row.size(); ++i) {
    largest[0] = row[i] > largest[0] ? row[i] : largest[0];
    unsound[0] |= static_cast<int>(!(row[i] <= std::numeric_limits<float>::max()));
  }
  Extent extent{*std::max_element(largest, largest + kLanes)};
  for (const int each : unsound) extent.sound = extent.sound && each == 0;
  return extent;
}

double exp_sum(std::span<const float> row, float largest) {
  double sums[kLanes] = {};
  const std::size_t whole = row.size() / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      sums[lane] += static_cast<double>(std::exp(row[i + lane] - largest));
  }
  double sum = 0;
  for (const double each : sums) sum += each;
  for (std::size_t i = whole; i < row.size(); ++i) sum += static_cast<double>(std::exp(row[i] - largest));
  return sum;
}

void select(std::span<const float> scores, std::int32_t first, std::size_t k, std::vector<Candidate>& best) {
  best.clear();
  // A heap whose front is the least likely of those kept.
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const float score = scores[i];
    if (best.size() == k && !(score > best.front().score)) continue;
    if (score == kNone) continue;
    if (best.size() == k) {
      std::pop_heap(best.begin(), best.end(), likelier);
      best.pop_back();
    }
    best.push_back({score, score, first + static_cast<std::int32_t>(i)});
    std::push_heap(best.begin(), best.end(), likelier);
  }
  std::sort_heap(best.begin(), best.end(), likelier);
}

void select_share(std::span<const float> scores, double temperature, double share,
                  std::vector<Candidate>& best) {
  const float largest = extent_of(scores).largest;
  double total = 0;
  best.clear();
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] == kNone) continue;
    total += weight(scores[i], largest, temperature);
    best.push_back({scores[i], scores[i], static_cast<std::int32_t>(i)});
  }
  // Few tokens have most of the sum: ever more of them are sorted until they are enough.
  std::size_t sorted = 0, kept = 0;
  double sum = 0;
  for (std::size_t wanted = 64; kept == sorted && sorted < best.size(); wanted *= 8) {
    const auto from = best.begin() + static_cast<std::ptrdiff_t>(sorted);
    sorted = std::min(best.size(), wanted);
    const auto to = best.begin() + static_cast<std::ptrdiff_t>(sorted);
    std::nth_element(from, to, best.end(), likelier);
    std::sort(from, to, likelier);
    while (kept < sorted && sum < share * total) sum += weight(best[kept++].score, largest, temperature);
  }
  best.resize(std::max<std::size_t>(kept, std::min<std::size_t>(best.size(), 1)));
}

void cut_to_share(std::vector<Candidate>& best, double temperature, double share) {
  const float largest = largest_of(best);
  double total = 0, sum = 0;
  for (const Candidate& each : best) total += weight(each.score, largest, temperature);
  std::size_t kept = 0;
  while (kept < best.size() && sum < share * total) sum += weight(best[kept++].score, largest, temperature);
  best.resize(std::max<std::size_t>(kept, std::min<std::size_t>(best.size(), 1)));
}

std::int32_t draw(std::vector<Candidate>& from, double temperature, double uniform) {
  TESSERA_CHECK(!from.empty(), "no token is left to draw: every one has probability 0");
  const float largest = largest_of(from);
  std::sort(from.begin(), from.end(),
            [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  double total = 0;
  for (const Candidate& each : from) total += weight(each.score, largest, temperature);
  double sum = 0;
  std::int32_t last = from.front().token;
  for (const Candidate& each : from) {
    const double own = weight(each.score, largest, temperature);
    if (own <= 0) continue;
    sum += own;
    last = each.token;
    if (sum > uniform * total) break;
  }
  return last;
}

std::int32_t draw(std::span<const float> scores, double temperature, double uniform) {
  const float largest = extent_of(scores).largest;
  TESSERA_CHECK(largest > kNone, "no token is left to draw: every one has probability 0");
  double total = 0;
  for (const float score : scores) total += weight(score, largest, temperature);
  double sum = 0;
  std::int32_t last = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double own = weight(scores[i], largest, temperature);
    if (own <= 0) continue;
    sum += own;
    last = static_cast<std::int32_t>(i);
    if (sum > uniform * total) break;
  }
  return last;
}

}  // namespace tessera::generation
