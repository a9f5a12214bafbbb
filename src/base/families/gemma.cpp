#include <algorithm>

#include "base/families/rows.hpp"

namespace tessera::rows {
namespace {

/// Both: a norm before and behind each branch, with weights around zero; a scaled embedding; a gate through
/// GELU; windows in most layers.
ModelSpec gemma_shape(const char* name, const Sizes& absent, double score_cap, double logit_cap) {
  using M = ModelSettings;
  ModelSpec row = llama_shape(name, absent);
  row.family = {name};
  row.model.activation = MlpActivation::geglu;
  row.model.tied_head = true;
  row.model.norm_placement = NormPlacement::sandwich;
  row.model.norm_zero_centered = true;
  row.model.embedding_scaled = true;
  row.model.attention_softcap = score_cap;
  row.model.logit_softcap = logit_cap;
  row.ffn_width = [](std::int64_t width) { return 4 * width; };
  std::erase_if(row.keys, [](const HfKey& key) { return key.field == HfKey::Field(&M::tied_head); });
  set_head_dim(row, 256);
  for (const HfKey& key : {HfKey::flag("tie_word_embeddings", &M::tied_head, true),
                           HfKey::flag("attention_bias", &M::qkv_bias, false),
                           HfKey::flag("attention_bias", &M::proj_bias, false),
                           HfKey::cap("attn_logit_softcapping", &M::attention_softcap, score_cap),
                           HfKey::cap("final_logit_softcapping", &M::logit_softcap, logit_cap),
                           HfKey::root("query_pre_attn_scalar", &M::attention_scale, 256)})
    row.keys.push_back(key);
  row.activations = {
      .key = "hidden_activation",
      .names = {{"gelu_pytorch_tanh", MlpActivation::geglu}, {"gelu_new", MlpActivation::geglu}},
      .absent = MlpActivation::geglu,
      .supported = "gelu_pytorch_tanh is",
      .remedy = "Use a model with that."};
  row.absent_padding = 0;
  row.demands = {{"use_bidirectional_attention", HfDemand::Only::is_false}};
  row.names.layer[3].ours = "post_attention_layernorm";
  row.names.layer.insert(row.names.layer.begin() + 4, {"pre_mlp_layernorm", {{"pre_feedforward_layernorm"}}});
  row.names.layer.push_back({"post_mlp_layernorm", {{"post_feedforward_layernorm"}}});
  row.needs = {{[](const ModelConfig& c) { return c.qkv_bias == has_proj_bias(c) && !c.linear_bias; },
                "its four projections of attention have biases, or none has, and its MLP has none"}};
  row.attributes[1].path = "model.layers.0.input_layernorm.eps";
  return row;
}

}  // namespace

/// Capped scores and logits; every second layer has the window.
ModelSpec gemma2() {
  ModelSpec row = gemma_shape("gemma2", {26, 2304, 8, 4, 9216, 256000, 8192}, 50.0, 30.0);
  row.architectures = {"Gemma2ForCausalLM", "Gemma2Model"};
  row.model.window_pattern = "SF";
  row.window = {HfWindow::Use::by_layer, 4096, 2};
  return row;
}

/// Normed queries and keys; five layers with the window and a rope of their own, then one without.
ModelSpec gemma3_text() {
  ModelSpec row = gemma_shape("gemma3_text", {26, 2304, 8, 4, 9216, 262208, 131072}, 0.0, 0.0);
  row.architectures = {"Gemma3ForCausalLM", "Gemma3TextModel"};
  row.model.qk_norm = QkNorm::head;
  row.model.window_pattern = "SSSSSF";
  row.model.rope_local_theta = 10000.0;
  row.window = {HfWindow::Use::by_layer, 4096, 6, "sliding_window_pattern"};
  row.rope.absent_theta = 1e6;
  row.rope.local_theta = "rope_local_base_freq";
  row.inert.push_back("_sliding_window_pattern");  // layer_types says it
  add_head_norms(row);
  return row;
}

}  // namespace tessera::rows
