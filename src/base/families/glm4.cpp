#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

/// Neighbouring features rotate together, in half of each head; biases of query, key and value alone.
ModelSpec glm_shape(const char* name) {
  using M = ModelSettings;
  ModelSpec row = llama_shape(name, {40, 4096, 32, 2, 13696, 151552, 131072});
  row.model.qkv_bias = true;
  set_head_dim(row, 128);
  for (HfKey& key : row.keys) {
    if (key.field == HfKey::Field(&M::norm_eps)) key.absent = {1.5625e-7};
  }
  row.keys.push_back(HfKey::flag("attention_bias", &M::qkv_bias, true));
  row.rope.partial = true;
  row.rope.absent_fraction = 0.5;
  row.rope.interleaved = true;
  row.absent_padding = 151329;
  stack_gate_and_up(row);
  row.needs = {{[](const ModelConfig& c) { return !c.linear_bias && !has_proj_bias(c); },
                "it has no biases but those of query, key and value"}};
  return row;
}

}  // namespace

/// GLM-4 of 2024.
ModelSpec glm() {
  ModelSpec row = glm_shape("glm");
  row.architectures = {"GlmForCausalLM", "GlmModel"};
  return row;
}

/// GLM-4 of 2025: a norm before and behind each branch.
ModelSpec glm4() {
  ModelSpec row = glm_shape("glm4");
  row.family = {"glm4"};
  row.ffn_width = llama().ffn_width;
  row.architectures = {"Glm4ForCausalLM", "Glm4Model"};
  row.model.norm_placement = NormPlacement::sandwich;
  row.names.layer.insert(row.names.layer.begin() + 3,
                         {"post_attention_layernorm", {{"post_self_attn_layernorm"}}});
  row.names.layer.push_back({"post_mlp_layernorm", {{"post_mlp_layernorm"}}});
  return row;
}

}  // namespace tessera::rows
