#include "checkpoint/hf_names.hpp"
#include "checkpoint/json_strict.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

void write_gpt2(const HfModelConfig& config, Json& out) {
  TESSERA_ENSURE(
      ConfigError,
      config.num_kv_heads == config.num_heads && !config.sliding_window &&
          config.head_dim * config.num_heads == config.hidden_size && config.qkv_bias && config.proj_bias &&
          config.linear_bias && config.activation != "swiglu",
      "Hugging Face's GPT-2 has all heads full, all biases and no gated activation; this model differs");
  out["n_layer"] = config.num_layers;
  out["n_embd"] = config.hidden_size;
  out["n_head"] = config.num_heads;
  out["n_positions"] = config.max_positions;
  out["n_inner"] = config.ffn_hidden_size;
  out["layer_norm_epsilon"] = config.norm_eps;
  out["activation_function"] = config.activation == "gelu_tanh" ? "gelu_new" : config.activation;
  out["resid_pdrop"] = config.dropout;
  out["embd_pdrop"] = config.embedding_dropout.value_or(config.dropout);
  out["attn_pdrop"] = config.attention_dropout;
}

void write_rope(const HfModelConfig& config, Json& out) {
  const HfRopeScaling& rope = config.rope_scaling;
  Json scaling = nullptr;
  if (rope.type == "linear") scaling = {{"rope_type", "linear"}, {"factor", rope.factor}};
  if (rope.type == "llama3") {
    scaling = {{"rope_type", "llama3"},
               {"factor", rope.factor},
               {"low_freq_factor", rope.low_freq_factor},
               {"high_freq_factor", rope.high_freq_factor},
               {"original_max_position_embeddings", rope.original_max_positions}};
  }
  // Both spellings, so that Transformers 4 and 5 read the same model.
  out["rope_theta"] = config.rope_theta;
  out["rope_scaling"] = scaling;
  if (scaling.is_null()) scaling = {{"rope_type", "default"}};
  scaling["rope_theta"] = config.rope_theta;
  out["rope_parameters"] = scaling;
}

void write_llama(const HfModelConfig& config, Json& out) {
  const bool qwen = config.model_type == "qwen2", mistral = config.model_type == "mistral";
  TESSERA_ENSURE(ConfigError, config.activation == "swiglu", "Hugging Face's Llama has SwiGLU, not ",
                 config.activation);
  TESSERA_ENSURE(ConfigError,
                 qwen      ? config.qkv_bias && !config.proj_bias && !config.linear_bias
                 : mistral ? !config.qkv_bias && !config.proj_bias && !config.linear_bias
                           : config.qkv_bias == config.proj_bias,
                 "Hugging Face's ", config.model_type, " has no such combination of biases");
  TESSERA_ENSURE(ConfigError, config.model_type != "llama" || !config.sliding_window,
                 "Hugging Face's llama has no sliding window");
  out["num_hidden_layers"] = config.num_layers;
  out["hidden_size"] = config.hidden_size;
  out["num_attention_heads"] = config.num_heads;
  out["num_key_value_heads"] = config.num_kv_heads;
  out["intermediate_size"] = config.ffn_hidden_size;
  out["max_position_embeddings"] = config.max_positions;
  out["rms_norm_eps"] = config.norm_eps;
  out["hidden_act"] = "silu";
  out["attention_dropout"] = config.attention_dropout;
  out["head_dim"] = config.head_dim;
  if (config.model_type == "llama") {
    out["attention_bias"] = config.qkv_bias;
    out["mlp_bias"] = config.linear_bias;
  }
  if (!config.sliding_window) {
    if (mistral) out["sliding_window"] = nullptr;
  } else {
    out["sliding_window"] = *config.sliding_window;
    if (qwen) out["use_sliding_window"] = true;
    if (qwen && !out.contains("layer_types") && !out.contains("max_window_layers"))
      out["max_window_layers"] = 0;
  }
  write_rope(config, out);
}

}  // namespace

std::string make_hf_config(const HfModelConfig& config, const std::string& base, DType dtype) {
  Json out = base.empty() ? Json::object() : parse_json(base, "config.json");
  const std::vector<std::string> known = architectures_of(config.model_type);
  TESSERA_ENSURE(ConfigError, !known.empty(), "no Hugging Face model type \"", config.model_type,
                 "\" is known");
  if (!out.contains("architectures")) out["architectures"] = {known[0]};
  out["model_type"] = config.model_type;
  out["vocab_size"] = config.vocab_size;
  out["tie_word_embeddings"] = config.tied_head;
  out["initializer_range"] = config.init_std;
  if (config.padding_id) out["pad_token_id"] = *config.padding_id;
  if (out.contains("dtype")) out["dtype"] = name_of(dtype);
  if (!out.contains("dtype") || out.contains("torch_dtype")) out["torch_dtype"] = name_of(dtype);
  config.family == "gpt2" ? write_gpt2(config, out) : write_llama(config, out);
  return to_text(out, 2) + "\n";
}

}  // namespace tessera
