#include "base/families/rows.hpp"

namespace tessera::rows {

/// LayerNorm, GELU and biases as in GPT-2, positions and query groups as in Llama.
ModelSpec starcoder2() {
  using M = ModelSettings;
  ModelSpec row = llama_shape("starcoder2", {30, 3072, 24, 2, 12288, 49152, 4096});
  row.family = Family::gpt2;
  row.model = gpt2().model;
  row.model.position_embedding = PositionKind::rotary;
  row.architectures = {"Starcoder2ForCausalLM", "Starcoder2Model"};
  row.keys = llama_sizes({30, 3072, 24, 2, 12288, 49152, 4096}, true);
  for (const HfKey& key :
       {HfKey::positive("norm_epsilon", &M::norm_eps, 1e-5), HfKey::flag("use_bias", &M::qkv_bias, true),
        HfKey::flag("use_bias", &M::proj_bias, true), HfKey::flag("use_bias", &M::linear_bias, true),
        HfKey::probability("residual_dropout", &M::dropout, 0.0),
        HfKey::probability("embedding_dropout", &M::embedding_dropout, 0.0),
        HfKey::positive("initializer_range", &M::init_std, 0.018042, 1e6)})
    row.keys.push_back(key);
  row.activations = plain_activations("hidden_act", "gelu_pytorch_tanh");
  row.window = {HfWindow::Use::always, 0};
  row.inert.insert(row.inert.end(), {"norm_type", "mlp_type", "rms_norm_eps", "hidden_dropout_prob"});
  row.names.layer[4].theirs = {{"mlp.c_fc"}};
  row.names.layer[5].theirs = {{"mlp.c_proj"}};
  row.needs = {
      {[](const ModelConfig& c) { return c.qkv_bias == c.linear_bias && has_proj_bias(c) == c.linear_bias; },
       "it has all biases or none"}};
  row.attributes[1].path = "model.layers.0.input_layernorm.eps";
  row.megatron_tokenizer = "GPT2BPETokenizer";
  return row;
}

}  // namespace tessera::rows
