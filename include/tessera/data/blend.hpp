#pragma once
/// Mixing several datasets in given proportions, as Megatron does.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// For each sample of the mix: which member, and that member's running count.
struct BlendIndices {
  std::vector<std::int16_t> dataset;
  std::vector<std::int64_t> sample;
};

/// `size` greedy draws: always the member furthest behind its share, w_d * max(i, 1) - count_d, the first on
/// ties. Errors: InvalidArgument for no member or more than 32767.
BlendIndices blend_indices(std::span<const double> weights, std::int64_t size);
/// Every sample of every member once, in proportion to the sizes; members drop out when used up.
BlendIndices exhaustive_blend_indices(std::span<const std::int64_t> sizes);

/// ceil(samples * weight): samples of one member that the mix plans to use.
std::int64_t blend_target(std::int64_t samples, double weight);
/// ceil(blend_target * 1.005): samples to build, a margin included.
std::int64_t blend_request(std::int64_t samples, double weight);

struct BlendMember {
  std::optional<double> weight{};  ///< none: by size
  std::string prefix{};
};

/// "w1 path1 w2 path2 ..." or paths only, already split into words. Errors: ConfigError when some but not all
/// paths have a weight, or a weight is negative.
std::vector<BlendMember> parse_blend(std::span<const std::string> words);

}  // namespace tessera
