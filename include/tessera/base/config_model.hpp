#pragma once
/// The section `model` of a training configuration.

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "tessera/base/config_words.hpp"

namespace tessera {

/// model: what it is made of. Open<T> is what every model has and settings may leave open.
template <template <typename> typename Open>
struct ModelFields {
  Family family = {};
  std::int64_t num_layers = 12;
  std::int64_t hidden_size = 768;
  std::int64_t num_heads = 12;
  std::int64_t num_kv_heads = 0;     ///< 0 = num_heads
  std::int64_t head_dim = 0;         ///< 0 = hidden_size / num_heads
  std::int64_t ffn_hidden_size = 0;  ///< 0 = the family's rule
  std::int64_t vocab_size = 50257;
  std::int64_t max_positions = 1024;
  double dropout = 0.0;  ///< on embeddings and residual branches
  double attention_dropout = 0.0;
  std::optional<double> embedding_dropout = std::nullopt;  ///< null = dropout
  Open<PositionKind> position_embedding = {};
  Open<NormStyle> norm = {};
  double norm_eps = 1e-5;
  Open<MlpActivation> activation = {};
  Open<bool> tied_head = {};
  Open<bool> linear_bias = {};                   ///< biases of the output projection and the MLP
  std::optional<bool> proj_bias = std::nullopt;  ///< of the output projection alone; null = linear_bias
  Open<bool> qkv_bias = {};
  Open<bool> parallel_residual = {};  ///< attention and MLP read the same residual stream
  std::optional<std::int64_t> token_types = std::nullopt;     ///< BERT's segments; null = the family's
  std::optional<bool> binary_head = std::nullopt;             ///< BERT's pooler and head for two sentences
  std::optional<std::int64_t> num_labels = std::nullopt;      ///< classes of samples, instead of a token head
  std::optional<ProblemType> problem_type = std::nullopt;     ///< what these are; null = by their number
  std::optional<std::int64_t> encoder_layers = std::nullopt;  ///< T5: the first of num_layers; null = half
  std::optional<std::int64_t> relative_buckets = std::nullopt;       ///< relative positions: the family's
  std::optional<std::int64_t> relative_max_distance = std::nullopt;  ///< from which on they are one bucket
  std::optional<bool> scaled_head = std::nullopt;  ///< T5: hidden_size^-1/2 before the head; null = tied_head
  std::optional<std::int64_t> sliding_window = std::nullopt;  ///< keys that a position sees, itself included
  /// Which layers have it: S (sliding) or F (full) for each, repeated over the layers; null = all.
  std::optional<std::string> window_pattern = std::nullopt;
  Open<QkNorm> qk_norm = {};
  Open<NormPlacement> norm_placement = {};
  Open<bool> shared_norm = {};                            ///< parallel_residual: one norm feeds both branches
  Open<bool> norm_zero_centered = {};                     ///< norms multiply by 1 + weight
  std::optional<bool> norm_bias = std::nullopt;           ///< of LayerNorm
  Open<bool> embedding_norm = {};                         ///< a norm behind the token table
  Open<bool> embedding_scaled = {};                       ///< embeddings times the root of hidden_size
  std::optional<double> attention_scale = std::nullopt;   ///< of scores; null = 1 / sqrt(head_dim)
  Open<double> attention_softcap = {};                    ///< c tanh(score / c); 0 = none
  Open<double> logit_softcap = {};                        ///< the same of logits
  std::optional<std::int64_t> padding_id = std::nullopt;  ///< token whose lookup gives no gradient
  double rope_theta = 10000.0;
  double rope_fraction = 1.0;     ///< share of each head's features that is rotated
  bool rope_interleaved = false;  ///< pairs (2i, 2i+1) instead of (i, i + d/2)
  RopeScaling rope_scaling = {};
  /// rope_theta of layers with a window, which are then not scaled; null = all layers are alike.
  std::optional<double> rope_local_theta = std::nullopt;
  std::optional<std::int64_t> num_experts = std::nullopt;  ///< MLPs of a layer, of which tokens take some
  std::int64_t router_topk = 2;                            ///< so many each
  std::optional<bool> router_normalized = std::nullopt;    ///< whose weights add up to 1; null = true
  std::optional<std::int64_t> moe_ffn_hidden_size = std::nullopt;  ///< of an expert; null = ffn_hidden_size
  /// Which layers have experts: E (experts) or D (dense) for each, repeated over the layers; null = all.
  std::optional<std::string> moe_layers = std::nullopt;
  double router_aux_loss = 0.0;  ///< weight of the loss that balances experts, per sample and layer
  double router_z_loss = 0.0;    ///< weight of the loss that keeps the router's logits small
  double init_std = 0.02;
  std::optional<std::string> init_from =
      std::nullopt;           ///< Hugging Face folder or converted folder to start from
  bool reinitialize = false;  ///< init_from may be of another model: what does not fit is drawn anew

  friend bool operator==(const ModelFields&, const ModelFields&) = default;
};

/// A model as somebody writes it: 0 and nullopt say that other keys or the family's row are to fill it in.
using ModelSettings = ModelFields<std::optional>;

/// A model with all of that filled in. Made of settings, so that nobody can leave anything open; what
/// resolved ones say stays as it is.
struct ModelConfig : ModelFields<std::type_identity_t> {
  ModelConfig(const ModelSettings& settings);
  operator ModelSettings() const;
};

/// Whether norms have a bias.
inline bool has_norm_bias(const ModelConfig& config) {
  return config.norm_bias.value_or(config.norm == NormStyle::layernorm);
}

/// Whether the output projection of attention has a bias.
inline bool has_proj_bias(const ModelConfig& config) { return config.proj_bias.value_or(config.linear_bias); }

/// The dropout on embeddings.
inline double embedding_dropout(const ModelConfig& config) {
  return config.embedding_dropout.value_or(config.dropout);
}

/// Whether `pattern`, a letter for each layer, repeated over the layers, has `letter` for layer `layer`; so
/// it has where there is none.
inline bool has_letter(const std::optional<std::string>& pattern, std::int64_t layer, char letter) {
  return !pattern || pattern->empty() ||
         (*pattern)[static_cast<std::size_t>(layer) % pattern->size()] == letter;
}

/// Keys that a position of layer `layer` sees, itself included; 0 = all before it.
inline std::int64_t window_of(const ModelConfig& config, std::int64_t layer) {
  return has_letter(config.window_pattern, layer, 'S') ? config.sliding_window.value_or(0) : 0;
}

/// Experts of layer `layer`; 0 = its MLP is one for all tokens.
inline std::int64_t experts_of(const ModelConfig& config, std::int64_t layer) {
  return has_letter(config.moe_layers, layer, 'E') ? config.num_experts.value_or(0) : 0;
}

/// How many layers have experts.
inline std::int64_t layers_with_experts(const ModelConfig& config) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < config.num_layers; ++i) count += experts_of(config, i) > 0 ? 1 : 0;
  return count;
}

/// Features inside an expert.
inline std::int64_t expert_width(const ModelConfig& config) {
  return config.moe_ffn_hidden_size.value_or(config.ffn_hidden_size);
}

/// Whether the layer rotates by rope_local_theta.
inline bool rotates_locally(const ModelConfig& config, std::int64_t layer) {
  return config.rope_local_theta && window_of(config, layer) > 0;
}

}  // namespace tessera
