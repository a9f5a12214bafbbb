#include "base/families/rows.hpp"

namespace tessera::rows {

/// Llama with normed queries and keys, and heads whose width is given.
ModelSpec qwen3() {
  using M = ModelSettings;
  ModelSpec row = llama_shape("qwen3", {32, 4096, 32, 32, 22016, 151936, 32768});
  row.family = {"qwen3"};
  row.model.qk_norm = QkNorm::head;
  row.ffn_width = llama().ffn_width;
  row.architectures = {"Qwen3ForCausalLM", "Qwen3Model"};
  set_head_dim(row, 128);
  row.keys.push_back(HfKey::flag("attention_bias", &M::qkv_bias, false));
  row.keys.push_back(HfKey::flag("attention_bias", &M::proj_bias, false));
  row.window = {HfWindow::Use::by_switch, 4096};
  add_head_norms(row);
  row.needs = {{[](const ModelConfig& c) { return c.qkv_bias == has_proj_bias(c) && !c.linear_bias; },
                "its four projections of attention have biases, or none has, and its MLP has none"}};
  return row;
}

}  // namespace tessera::rows
