#pragma once
#include "tessera/nn/bodies.hpp"

namespace tessera {

/// Devlin et al., "BERT": norms behind each branch and behind the embedding.
std::unique_ptr<Model> build_bert(const ModelConfig& config, const Numerics& numerics,
                                  const Sharding& sharding);
/// Megatron's BERT: norms before each branch and behind the last layer.
std::unique_ptr<Model> build_megatron_bert(const ModelConfig& config, const Numerics& numerics,
                                           const Sharding& sharding);

}  // namespace tessera
