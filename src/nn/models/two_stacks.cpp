#include "nn/models/two_stacks.hpp"

#include "tessera/base/model_math.hpp"

namespace tessera::nn {

TwoStacks::TwoStacks(const ModelConfig& config, const Numerics& numerics, const Sharding& given)
    : Stack(config.hidden_size, config.num_layers, numerics, given), config_(config) {}

double TwoStacks::flops_per_token(const SampleLengths& lengths) const {
  return two_stack_flops_per_token(config_, lengths);
}

void TwoStacks::check_stacks(const std::string& family) const {
  const ModelConfig& c = config_;
  const auto need = [&](bool holds, const char* what) { TESSERA_ENSURE(ConfigError, holds, family, what); };
  need(!c.parallel_residual, " has its attention and MLP one after the other");
  need(!c.padding_id, " has no padding row in its table");
  need(!c.token_types && !c.binary_head.value_or(false) && !c.num_labels, " has a head for tokens alone");
  TESSERA_ENSURE(ConfigError, *c.encoder_layers >= 1 && *c.encoder_layers < c.num_layers,
                 "model.encoder_layers (", *c.encoder_layers, ") of model.num_layers (", c.num_layers,
                 "): encoder and decoder have at least one layer each");
  const int ranks = sharding().tensor.size();
  TESSERA_ENSURE(ConfigError, c.vocab_size >= ranks, "model.vocab_size (", c.vocab_size,
                 ") is less than parallel.tensor (", ranks, ")");
}

std::string TwoStacks::layer_name(std::int64_t layer) const {
  const std::int64_t encoder = encoder_layers();
  return layer < encoder ? "encoder.layers." + std::to_string(layer)
                         : "decoder.layers." + std::to_string(layer - encoder);
}

}  // namespace tessera::nn
