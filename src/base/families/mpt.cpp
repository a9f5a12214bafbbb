#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

HfNames mpt_names() {
  return {.prefix = "transformer.",
          .layers = "blocks.",
          .embedding = "wte",
          .positions = "wpe",
          .layer = {{"input_layernorm", {{"norm_1"}}},
                    {"self_attention.linear_qkv", {{"attn.Wqkv"}}},
                    {"self_attention.linear_proj", {{"attn.out_proj"}}},
                    {"pre_mlp_layernorm", {{"norm_2"}}},
                    {"mlp.linear_fc1", {{"ffn.up_proj"}}},
                    {"mlp.linear_fc2", {{"ffn.down_proj"}}}},
          .final_norm = "norm_f"};
}

}  // namespace

/// ALiBi, norms without biases, and no other bias.
ModelSpec mpt() {
  using M = ModelSettings;
  using Only = HfDemand::Only;
  ModelSpec row = gpt2();
  row.name = "mpt";
  row.family = {"mpt"};
  row.model.position_embedding = PositionKind::alibi;
  row.model.activation = MlpActivation::gelu;
  row.model.norm_bias = false;
  row.model.linear_bias = false;
  row.model.qkv_bias = false;
  row.model.embedding_dropout = 0.0;
  row.architectures = {"MptForCausalLM", "MptModel"};
  row.nested = "attn_config";
  row.keys = {HfKey::size("n_layers", &M::num_layers, {24}, "num_hidden_layers"),
              HfKey::size("d_model", &M::hidden_size, {2048}, "hidden_size"),
              HfKey::size("n_heads", &M::num_heads, {16}, "num_attention_heads"),
              HfKey::size("vocab_size", &M::vocab_size, {50368}),
              HfKey::size("max_seq_len", &M::max_positions, {2048}),
              HfKey::positive("layer_norm_epsilon", &M::norm_eps, 1e-5),
              HfKey::flag("tie_word_embeddings", &M::tied_head, true),
              HfKey::probability("attn_config.attn_pdrop", &M::dropout, 0.0),
              HfKey::probability("attn_config.attn_pdrop", &M::attention_dropout, 0.0),
              HfKey::positive("initializer_range", &M::init_std, 0.02, 1e6)};
  for (HfKey& key : row.keys) key.whole_zero = true;
  row.activations = {.key = "", .names = {}, .absent = MlpActivation::gelu};
  row.demands = {{"no_bias", Only::is_true},
                 {"attn_config.alibi", Only::is_true},
                 {"attn_config.clip_qkv", Only::zero},
                 {"attn_config.softmax_scale", Only::absent},
                 {"attn_config.prefix_lm", Only::is_false},
                 {"attn_config.qk_ln", Only::is_false},
                 {"attn_config.attn_uses_sequence_id", Only::is_false}};
  row.inert = {"attn_config.attn_type",
               "attn_config.attn_impl",
               "attn_config.alibi_bias_max",
               "attn_config.model_type",
               "resid_pdrop",
               "emb_pdrop",
               "norm_type"};
  row.names = mpt_names();
  row.needs.back() = {[](const ModelConfig& c) { return !c.qkv_bias && !c.linear_bias && !has_proj_bias(c); },
                      "it has no biases"};
  row.needs.push_back({[](const ModelConfig& c) {
                         return c.ffn_hidden_size == 4 * c.hidden_size && c.activation == MlpActivation::gelu;
                       },
                       "its MLP is four times as wide as the model, with the GELU of erf"});
  row.needs.push_back({[](const ModelConfig& c) {
                         return c.attention_dropout == c.dropout && embedding_dropout(c) == 0.0 &&
                                !c.padding_id;
                       },
                       "it has one dropout and none on the embedding, and no padding row"});
  row.attributes = {{"num_heads", "transformer.blocks.0.attn.n_heads"},
                    {"head_dim", "transformer.blocks.0.attn.head_dim"},
                    {"norm_eps", "transformer.blocks.0.norm_1.eps"}};
  return row;
}

}  // namespace tessera::rows
