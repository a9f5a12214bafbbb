#include "base/families/rows.hpp"

namespace tessera::rows {

/// GPT-2 with one key and value head, and linears stored [out, in].
ModelSpec gpt_bigcode() {
  ModelSpec row = gpt2();
  row.name = "gpt_bigcode";
  row.model.num_kv_heads = 1;
  row.architectures = {"GPTBigCodeForCausalLM", "GPTBigCodeModel"};
  row.demands.insert(row.demands.begin(), {"multi_query", HfDemand::Only::is_true,
                                           "must be true or absent: all heads full make a GPT-2",
                                           "Make the model with model_type gpt2."});
  row.constants = {{"multi_query", true}};
  row.names.transposed = false;
  row.needs.front() = {[](const ModelConfig& c) { return c.num_kv_heads == 1; },
                       "it has one key and value head"};
  row.attributes.push_back({"num_kv_heads", "transformer.h.0.attn.kv_heads"});
  return row;
}

}  // namespace tessera::rows
