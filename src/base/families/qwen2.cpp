#include "base/families/rows.hpp"

namespace tessera::rows {

ModelSpec qwen2() {
  ModelSpec row = llama_shape("qwen2", {32, 4096, 32, 32, 22016, 151936, 32768});
  row.model.qkv_bias = true;
  row.architectures = {"Qwen2ForCausalLM", "Qwen2Model"};
  row.window = {HfWindow::Use::by_switch, 4096};
  row.needs = {{[](const ModelConfig& c) { return c.qkv_bias && !c.linear_bias && !has_proj_bias(c); },
                "its biases are those of query, key and value alone"}};
  return row;
}

}  // namespace tessera::rows
