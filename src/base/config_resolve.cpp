#include "tessera/base/config_file.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

ModelConfig resolve(ModelConfig config) {
  const ModelSpec& family = spec_of(config.family);
  const auto fill = [&](auto ModelConfig::*field) {
    if (!(config.*field)) config.*field = family.model.*field;
  };
  if (config.num_kv_heads == 0) config.num_kv_heads = config.num_heads;
  if (config.head_dim == 0 && config.num_heads > 0) config.head_dim = config.hidden_size / config.num_heads;
  if (config.ffn_hidden_size == 0) config.ffn_hidden_size = family.ffn_width(config.hidden_size);
  fill(&ModelConfig::position_embedding);
  fill(&ModelConfig::norm);
  fill(&ModelConfig::activation);
  fill(&ModelConfig::tied_head);
  fill(&ModelConfig::linear_bias);
  fill(&ModelConfig::qkv_bias);
  fill(&ModelConfig::parallel_residual);
  fill(&ModelConfig::token_types);
  if (config.num_labels && !config.binary_head) config.binary_head = false;  // one head takes their place
  fill(&ModelConfig::binary_head);
  fill(&ModelConfig::relative_buckets);
  fill(&ModelConfig::relative_max_distance);
  if (family.encoder_decoder && !config.encoder_layers) config.encoder_layers = config.num_layers / 2;
  if (family.model.scaled_head && !config.scaled_head) config.scaled_head = config.tied_head;
  return config;
}

Config resolve(Config config) {
  config.model = resolve(config.model);
  config.parallel.virtual_stages = chunks_of(config.parallel.schedule, config.parallel.virtual_stages);
  if (config.lr_schedule.decay_steps == 0) config.lr_schedule.decay_steps = config.training.steps;
  if (!config.lr_schedule.end_weight_decay)
    config.lr_schedule.end_weight_decay = config.optimizer.weight_decay;
  return config;
}

SampleLengths sample_lengths(const Config& config) {
  const TrainingConfig& t = config.training;
  if (spec_of(config.model.family).samples != ModelSpec::Samples::corrupted_spans)
    return {.tokens = t.seq_length};
  return {.tokens = t.decoder_seq_length.value_or(t.seq_length), .encoder = t.seq_length};
}

}  // namespace tessera
