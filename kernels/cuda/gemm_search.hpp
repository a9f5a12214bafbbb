#pragma once
/// The search for the fastest of many ways to do the same. Header only and free of CUDA, so that it is tested
/// in every build.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

namespace tessera::kernels::cuda {

/// Seconds of way i, run for about `budget_s`; empty if it does not run.
using TimeWay = std::function<std::optional<double>(std::size_t way, double budget_s)>;

struct FastestWay {
  std::size_t way = 0;
  double seconds = 0, first_s = 0;  ///< `first_s`: of the first that runs
  int ran = 0;
};

namespace detail {

constexpr double kGlance = 1e-3, kLook = 4e-3;  // seconds
constexpr std::size_t kFinalists = 4;
constexpr int kTurns = 5;
/// What is faster by less than this may be noise.
constexpr double kNoise = 0.01;

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace detail

/// Ways that ran, the fastest at a glance first.
inline std::vector<std::size_t> by_speed(const std::vector<std::optional<double>>& seconds) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < seconds.size(); ++i)
    if (seconds[i]) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return *seconds[a] < *seconds[b]; });
  return order;
}

/// The fastest of `seconds.size()` ways, which were timed at a glance. The best few, and the first one, take
/// turns, so that clocks that fall slow all of them alike; medians count, and the first one is kept where
/// another is not clearly faster. Empty if none ran.
inline std::optional<FastestWay> fastest_way(const std::vector<std::optional<double>>& seconds,
                                             const TimeWay& time) {
  std::vector<std::size_t> order = by_speed(seconds);
  if (order.empty()) return std::nullopt;
  FastestWay best{.ran = static_cast<int>(order.size())};
  const std::size_t first = *std::min_element(order.begin(), order.end());
  order.resize(std::min(order.size(), detail::kFinalists));
  if (std::find(order.begin(), order.end(), first) == order.end()) order.push_back(first);
  std::vector<std::vector<double>> turns(order.size());
  for (int turn = 0; turn < detail::kTurns; ++turn) {
    for (std::size_t i = 0; i < order.size(); ++i)
      turns[i].push_back(time(order[i], detail::kLook).value_or(*seconds[order[i]]));
  }
  for (std::size_t i = 0; i < order.size(); ++i)
    if (order[i] == first) best.first_s = detail::median(turns[i]);
  best.way = first;
  best.seconds = best.first_s;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const double median = detail::median(turns[i]);
    if (median >= best.seconds || median > best.first_s * (1 - detail::kNoise)) continue;
    best.way = order[i];
    best.seconds = median;
  }
  return best;
}

}  // namespace tessera::kernels::cuda
