#pragma once
/// What the readers and writers of architectures have in common.

#include "tessera/base/families.hpp"

namespace tessera::checkpoint_detail {

constexpr std::int64_t kMaxLayers = 10'000;
constexpr std::int64_t kMaxSize = std::int64_t{1} << 28;

/// Position interpolation is Llama-3's rule with every wavelength counted as long.
constexpr RopeScaling linear_scaling(double factor) { return {factor, 1.0, 4.0, 1}; }
inline bool is_linear(const RopeScaling& scaling) { return scaling == linear_scaling(scaling.factor); }

/// A model resolved, without what says how it is trained, spelt in one way of several that mean the same.
ModelConfig canonical(ModelConfig model);

}  // namespace tessera::checkpoint_detail
