#pragma once
/// Weight counts in any number type: in double they cannot overflow, so sizes can be checked before they are
/// used.

#include "tessera/base/config_model.hpp"

namespace tessera {

template <typename N>
N mlp_weights(const ModelConfig& m, std::int64_t width) {
  return static_cast<N>(is_gated(m.activation) ? 3 : 2) * static_cast<N>(m.hidden_size) *
         static_cast<N>(width);
}

/// Of layer `layer`'s MLP or of `experts` of its experts and their router.
template <typename N>
N layer_mlp_weights(const ModelConfig& m, std::int64_t layer, std::int64_t experts) {
  const std::int64_t all = experts_of(m, layer);
  if (all == 0) return mlp_weights<N>(m, m.ffn_hidden_size);
  return static_cast<N>(experts) * mlp_weights<N>(m, expert_width(m)) +
         static_cast<N>(all) * static_cast<N>(m.hidden_size);
}

/// Those that multiply a token, `experts` experts of a layer with some.
template <typename N>
N count_matmul_weights(const ModelConfig& m, std::int64_t experts) {
  const N width = static_cast<N>(m.hidden_size);
  const N head_dim = static_cast<N>(m.head_dim);
  const N qkv = static_cast<N>(m.num_heads + 2 * m.num_kv_heads) * head_dim * width;
  const N projection = width * static_cast<N>(m.num_heads) * head_dim;
  N mlps = 0;
  for (std::int64_t i = 0; i < m.num_layers; ++i) mlps += layer_mlp_weights<N>(m, i, experts);
  // A decoder behind an encoder attends twice.
  const N crossing = m.encoder_layers ? static_cast<N>(m.num_layers - *m.encoder_layers) : N{0};
  return static_cast<N>(m.num_layers) * (qkv + projection) + mlps + crossing * (qkv + projection) +
         static_cast<N>(m.vocab_size) * width;
}

/// What BERT has beside an embedding and layers: types of tokens, the transform and the biases before the
/// vocabulary, and with the binary head pooler and two classes.
template <typename N>
N count_bert_heads(const ModelConfig& m, N norm) {
  if (!m.token_types) return 0;
  const N width = static_cast<N>(m.hidden_size), square = width * width + width;
  N total = static_cast<N>(*m.token_types) * width + square + norm + static_cast<N>(m.vocab_size);
  if (m.binary_head.value_or(false)) total += square + 2 * width + 2;
  return total;
}

template <typename N>
N count_parameters(const ModelConfig& m) {
  const N width = static_cast<N>(m.hidden_size);
  const N norm = has_norm_bias(m) ? 2 * width : width;
  N layer_norms = (m.norm_placement == NormPlacement::sandwich ? 4 : m.shared_norm ? 1 : 2) * norm;
  if (m.qk_norm == QkNorm::head) layer_norms += 2 * static_cast<N>(m.head_dim);
  if (m.qk_norm == QkNorm::full)
    layer_norms += static_cast<N>(m.num_heads + m.num_kv_heads) * static_cast<N>(m.head_dim);
  N layer_biases = 0;
  if (m.qkv_bias)
    layer_biases += static_cast<N>(m.num_heads + 2 * m.num_kv_heads) * static_cast<N>(m.head_dim);
  if (m.linear_bias) {
    const N fc1 = static_cast<N>(m.ffn_hidden_size) * static_cast<N>(is_gated(m.activation) ? 2 : 1);
    layer_biases += fc1 + width;
  }
  if (has_proj_bias(m)) layer_biases += width;
  N total = count_matmul_weights<N>(m, m.num_experts.value_or(0)) +
            static_cast<N>(m.num_layers) * (layer_norms + layer_biases) + norm;
  if (m.embedding_norm) total += norm;
  if (!m.tied_head) total += static_cast<N>(m.vocab_size) * width;
  if (m.position_embedding == PositionKind::learned) total += static_cast<N>(m.max_positions) * width;
  if (m.encoder_layers) {
    N crossing_biases = 0;
    if (m.qkv_bias)
      crossing_biases += static_cast<N>(m.num_heads + 2 * m.num_kv_heads) * static_cast<N>(m.head_dim);
    if (has_proj_bias(m)) crossing_biases += width;
    total += static_cast<N>(m.num_layers - *m.encoder_layers) * (norm + crossing_biases) + norm;
    // Positions by tables of buckets, or, in Megatron's, learned, with a bias before the vocabulary.
    total += m.relative_buckets ? 2 * static_cast<N>(*m.relative_buckets) * static_cast<N>(m.num_heads)
                                : static_cast<N>(m.vocab_size);
  }
  return total + count_bert_heads<N>(m, norm);
}

}  // namespace tessera
