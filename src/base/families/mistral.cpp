#include "base/families/rows.hpp"

namespace tessera::rows {

ModelSpec mistral() {
  ModelSpec row = llama_shape("mistral", {32, 4096, 32, 8, 14336, 32000, 131072});
  row.architectures = {"MistralForCausalLM", "MistralModel"};
  row.window = {HfWindow::Use::always, 4096};
  row.needs = {{[](const ModelConfig& c) { return !c.qkv_bias && !c.linear_bias && !has_proj_bias(c); },
                "it has no biases"}};
  return row;
}

}  // namespace tessera::rows
