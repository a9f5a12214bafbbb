#include "nn/relative_positions.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace tessera::nn {

std::int64_t relative_bucket(std::int64_t relative, bool both_sides, std::int64_t buckets,
                             std::int64_t most) {
  std::int64_t first = 0, distance = std::max<std::int64_t>(-relative, 0);
  if (both_sides) {
    buckets /= 2;
    if (relative > 0) first = buckets;
    distance = std::abs(relative);
  }
  const std::int64_t exact = buckets / 2;
  if (distance < exact) return first + distance;
  // In fp32, as it was trained.
  const float share = std::log(static_cast<float>(distance) / static_cast<float>(exact)) /
                      static_cast<float>(std::log(static_cast<double>(most) / static_cast<double>(exact))) *
                      static_cast<float>(buckets - exact);
  return first + std::min(exact + static_cast<std::int64_t>(share), buckets - 1);
}

void RelativePositions::make(const ExecCtx& ctx) {
  if (!both_) make(ctx, config_.max_positions);
}

std::int64_t RelativePositions::reserve(const ExecCtx& ctx, std::int64_t positions) {
  if (positions <= std::max(positions_, config_.max_positions)) return positions_;
  // Twice as many: ever longer samples make few tables.
  make(ctx, std::min(2 * positions, kMost));
  return positions_;
}

Tensor RelativePositions::buckets(std::int64_t length, bool both_sides) const {
  TESSERA_CHECK(length <= positions_, "buckets of ", positions_, " positions for a sequence of ", length);
  return (both_sides ? both_ : before_).narrow(0, positions_ - length, 2 * length - 1);
}

void RelativePositions::make(const ExecCtx& ctx, std::int64_t positions) {
  const auto table = [&](bool both_sides) {
    std::vector<std::int32_t> list;
    for (std::int64_t n = 0; n < 2 * positions - 1; ++n)
      list.push_back(static_cast<std::int32_t>(relative_bucket(
          positions - 1 - n, both_sides, *config_.relative_buckets, *config_.relative_max_distance)));
    return Tensor::from(ctx, list, {2 * positions - 1});
  };
  both_ = table(true);
  before_ = table(false);
  positions_ = positions;
}

}  // namespace tessera::nn
