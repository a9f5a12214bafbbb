#pragma once
#include "tessera/nn/layers.hpp"

namespace tessera::nn {

/// A norm of the residual stream. forget: its values are computed again in backward.
inline Norm::Options norm_options(const ModelConfig& config, const TensorParallel& tensor, DType compute,
                                  bool forget = false) {
  return {.size = config.hidden_size,
          .style = config.norm,
          .eps = config.norm_eps,
          .out = compute,
          .sequence_parallel = tensor.sharded_sequence(),
          .forget = forget,
          .zero_centered = config.norm_zero_centered,
          .bias = has_norm_bias(config)};
}

}  // namespace tessera::nn
