#pragma once
/// Megatron's "969,30,1": shares of a dataset for training, validation and test.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

enum class Split { train, valid, test };

/// "train", "valid", "test".
const char* name_of(Split split);

/// Bounds of each split as fractions; a split without a share is none.
using SplitBounds = std::array<std::optional<std::pair<double, double>>, 3>;

/// Parses up to three numbers separated by commas (or slashes), missing ones 0. Errors: ConfigError.
SplitBounds parse_split(const std::string& text);

/// Elements [begin, end).
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// [int(round(lower * n)), int(round(upper * n))), rounding halves to even as Python does; none for a split
/// without a share.
std::array<std::optional<ElementRange>, 3> split_ranges(const SplitBounds& bounds, std::int64_t elements);

/// Weights divided by their sum, added in numpy's order. Errors: InvalidArgument unless the sum is finite and
/// positive and no weight negative.
std::vector<double> normalized(std::span<const double> weights);

}  // namespace tessera
