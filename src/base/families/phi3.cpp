#include <string_view>

#include "base/families/rows.hpp"

namespace tessera::rows {

void stack_gate_and_up(ModelSpec& row) {
  for (HfParameter& each : row.names.layer) {
    if (std::string_view(each.ours) == "mlp.linear_fc1") each.theirs = {{"mlp.gate_up_proj"}};
  }
}

/// Llama whose query, key and value are one matrix, as are gate and up.
ModelSpec phi3() {
  using M = ModelSettings;
  ModelSpec row = llama_shape("phi3", {32, 3072, 32, 0, 8192, 32064, 4096});
  row.architectures = {"Phi3ForCausalLM", "Phi3Model"};
  for (HfKey& key : row.keys) {
    if (key.field == HfKey::Field(&M::norm_eps)) key.absent = {1e-5};
  }
  row.keys.push_back(HfKey::probability("resid_pdrop", &M::dropout, 0.0));
  row.window = {HfWindow::Use::always, 0};
  row.rope.partial = true;
  row.model.embedding_dropout = 0.0;
  row.absent_padding = 32000;
  row.inert.push_back("embd_pdrop");  // Transformers' model has no dropout there
  row.names.layer[1].theirs = {{"self_attn.qkv_proj"}};
  stack_gate_and_up(row);
  row.needs = {{[](const ModelConfig& c) { return !c.qkv_bias && !c.linear_bias && !has_proj_bias(c); },
                "it has no biases"}};
  return row;
}

}  // namespace tessera::rows
