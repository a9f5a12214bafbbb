#pragma once
#include "tessera/nn/bodies.hpp"

namespace tessera {

/// Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer".
std::unique_ptr<Model> build_t5(const ModelConfig& config, const Numerics& numerics,
                                const Sharding& sharding);

}  // namespace tessera
