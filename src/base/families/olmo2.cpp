#include "base/families/rows.hpp"

namespace tessera::rows {

/// Norms only behind each branch, and over all queries and all keys of a position.
ModelSpec olmo2() {
  using M = ModelSettings;
  ModelSpec row = llama_shape("olmo2", {32, 4096, 32, 0, 11008, 50304, 2048});
  row.family = {"olmo2"};
  row.model.norm_placement = NormPlacement::post;
  row.model.qk_norm = QkNorm::full;
  row.ffn_width = llama().ffn_width;
  row.architectures = {"Olmo2ForCausalLM", "Olmo2Model"};
  for (HfKey& key : row.keys) {
    if (key.field == HfKey::Field(&M::norm_eps)) key.absent = {1e-5};
  }
  row.keys.push_back(HfKey::flag("attention_bias", &M::qkv_bias, false));
  row.keys.push_back(HfKey::flag("attention_bias", &M::proj_bias, false));
  row.absent_padding = 1;
  row.names.layer[0] = {"post_attention_layernorm", {{"post_attention_layernorm"}}};
  row.names.layer.erase(row.names.layer.begin() + 3);
  row.names.layer.push_back({"post_mlp_layernorm", {{"post_feedforward_layernorm"}}});
  add_head_norms(row);
  row.needs = {{[](const ModelConfig& c) { return c.qkv_bias == has_proj_bias(c) && !c.linear_bias; },
                "its four projections of attention have biases, or none has, and its MLP has none"}};
  row.attributes[1].path = "model.layers.0.post_attention_layernorm.variance_epsilon";
  return row;
}

}  // namespace tessera::rows
