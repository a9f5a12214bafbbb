#pragma once
#include "tessera/nn/layers.hpp"

namespace tessera::nn {

/// The two linears of an MLP with `width` features inside.
Linear::Options fc1_options(const ModelConfig& config, const TensorParallel& tensor, std::int64_t width);
Linear::Options fc2_options(const ModelConfig& config, const TensorParallel& tensor, std::int64_t width);

}  // namespace tessera::nn
