#include "tessera/base/config_file.hpp"

namespace tessera {

namespace {

/// Two thirds of 4 * width, rounded up to a multiple of 256: the width of Llama's gated MLP.
std::int64_t gated_width(std::int64_t hidden_size) { return (8 * hidden_size / 3 + 255) / 256 * 256; }

}  // namespace

ModelConfig resolve(ModelConfig config) {
  const bool llama = config.family == Family::llama;
  if (config.num_kv_heads == 0) config.num_kv_heads = config.num_heads;
  if (config.head_dim == 0 && config.num_heads > 0) config.head_dim = config.hidden_size / config.num_heads;
  if (config.ffn_hidden_size == 0) {
    config.ffn_hidden_size = llama ? gated_width(config.hidden_size) : 4 * config.hidden_size;
  }
  if (!config.position_embedding) {
    config.position_embedding = llama ? PositionKind::rotary : PositionKind::learned;
  }
  if (!config.norm) config.norm = llama ? NormStyle::rmsnorm : NormStyle::layernorm;
  if (!config.activation) config.activation = llama ? MlpActivation::swiglu : MlpActivation::gelu_tanh;
  if (!config.tied_head) config.tied_head = !llama;
  if (!config.linear_bias) config.linear_bias = !llama;
  if (!config.qkv_bias) config.qkv_bias = !llama;
  return config;
}

Config resolve(Config config) {
  config.model = resolve(config.model);
  if (config.parallel.schedule == PipelineSchedule::zb_v && config.parallel.virtual_stages == 1)
    config.parallel.virtual_stages = 2;
  if (config.lr_schedule.decay_steps == 0) config.lr_schedule.decay_steps = config.training.steps;
  if (!config.lr_schedule.end_weight_decay)
    config.lr_schedule.end_weight_decay = config.optimizer.weight_decay;
  return config;
}

}  // namespace tessera
