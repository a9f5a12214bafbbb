#pragma once
#include "tessera/nn/bodies.hpp"

namespace tessera {

/// Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer".
std::unique_ptr<Model> build_t5(const ModelConfig& config, const Numerics& numerics,
                                const Sharding& sharding);

/// Megatron-LM's T5, which is another model: positions are learned, and scores, norms, biases those of its
/// BERT.
std::unique_ptr<Model> build_megatron_t5(const ModelConfig& config, const Numerics& numerics,
                                         const Sharding& sharding);

}  // namespace tessera
