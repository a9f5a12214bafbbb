#include "tessera/base/config_file.hpp"
#include "tessera/base/families.hpp"

namespace tessera {

ModelConfig resolve(ModelConfig config) {
  const ModelSpec& family = spec_of(config.family);
  const auto fill = [&](auto ModelConfig::*field) {
    if (!(config.*field)) config.*field = family.model.*field;
  };
  // What few families have: the others leave it out of their rows.
  const auto fill_with = [&](auto ModelConfig::*field, auto otherwise) {
    fill(field);
    if (!(config.*field)) config.*field = otherwise;
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
  fill_with(&ModelConfig::shared_norm, false);
  fill_with(&ModelConfig::qk_norm, QkNorm::none);
  fill_with(&ModelConfig::norm_placement, NormPlacement::pre);
  fill_with(&ModelConfig::norm_zero_centered, false);
  fill_with(&ModelConfig::norm_bias, config.norm == NormStyle::layernorm);
  fill_with(&ModelConfig::embedding_norm, false);
  fill_with(&ModelConfig::embedding_scaled, false);
  fill_with(&ModelConfig::attention_softcap, 0.0);
  fill_with(&ModelConfig::logit_softcap, 0.0);
  if (config.sliding_window) fill(&ModelConfig::window_pattern);
  fill(&ModelConfig::rope_local_theta);
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

std::string lengths_text(const Config& config) {
  const SampleLengths lengths = sample_lengths(config);
  if (lengths.encoder == 0) return detail::concat(lengths.tokens, " tokens");
  return detail::concat(lengths.encoder, " tokens and ", lengths.tokens, " in the decoder");
}

}  // namespace tessera
