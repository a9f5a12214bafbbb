#include "base/families/rows.hpp"

namespace tessera::rows {

/// ALiBi, a norm behind the embedding, query, key and value of each head together.
ModelSpec bloom() {
  using M = ModelSettings;
  using Only = HfDemand::Only;
  ModelSpec row = gpt2();
  row.name = "bloom";
  row.family = {"bloom"};
  row.model.position_embedding = PositionKind::alibi;
  row.model.embedding_norm = true;
  row.model.embedding_dropout = 0.0;
  row.architectures = {"BloomForCausalLM", "BloomModel"};
  row.keys = {HfKey::size("n_layer", &M::num_layers, {2}, "num_hidden_layers"),
              HfKey::size("hidden_size", &M::hidden_size, {64}, "n_embed"),
              HfKey::size("n_head", &M::num_heads, {8}, "num_attention_heads"),
              HfKey::size("vocab_size", &M::vocab_size, {250880}),
              HfKey::size("seq_length", &M::max_positions, {2048}),  // which Transformers does not read
              HfKey::positive("layer_norm_epsilon", &M::norm_eps, 1e-5),
              HfKey::flag("tie_word_embeddings", &M::tied_head, true),
              HfKey::probability("hidden_dropout", &M::dropout, 0.0),
              HfKey::probability("attention_dropout", &M::attention_dropout, 0.0),
              HfKey::positive("initializer_range", &M::init_std, 0.02, 1e6)};
  row.activations = {.key = "", .names = {}};
  row.demands = {{"apply_residual_connection_post_layernorm", Only::is_false}};
  row.inert = {"pretraining_tp",      "slow_but_exact",        "attention_softmax_in_fp32",
               "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi",
               "skip_bias_add",       "skip_bias_add_qkv"};
  row.names = {.prefix = "transformer.",
               .layers = "h.",
               .embedding = "word_embeddings",
               .positions = "position_embeddings",
               .layer = {{"input_layernorm", {{"input_layernorm"}}},
                         {"self_attention.linear_qkv",
                          {{.name = "self_attention.query_key_value", .order = HfTensor::Order::grouped}}},
                         {"self_attention.linear_proj", {{"self_attention.dense"}}},
                         {"pre_mlp_layernorm", {{"post_attention_layernorm"}}},
                         {"mlp.linear_fc1", {{"mlp.dense_h_to_4h"}}},
                         {"mlp.linear_fc2", {{"mlp.dense_4h_to_h"}}}},
               .final_norm = "ln_f",
               .front = {{"embedding.norm", {{"word_embeddings_layernorm"}}}}};
  row.needs.push_back({[](const ModelConfig& c) {
                         return c.ffn_hidden_size == 4 * c.hidden_size &&
                                c.activation == MlpActivation::gelu_tanh;
                       },
                       "its MLP is four times as wide as the model, with the GELU of tanh"});
  row.needs.push_back({[](const ModelConfig& c) { return !c.padding_id && embedding_dropout(c) == 0.0; },
                       "its embedding has no dropout and no padding row"});
  row.attributes = {{"num_heads", "transformer.h.0.self_attention.num_heads"},
                    {"head_dim", "transformer.h.0.self_attention.head_dim"},
                    {"norm_eps", "transformer.h.0.input_layernorm.eps"}};
  return row;
}

}  // namespace tessera::rows
