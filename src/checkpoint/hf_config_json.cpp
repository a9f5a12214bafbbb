#include "checkpoint/hf_names.hpp"
#include "checkpoint/json_strict.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

/// Which models a type of Transformers holds, as far as switches go.
struct TypeFacts {
  const char* name;
  const char *positions, *norm;
  bool gated;
};
constexpr TypeFacts kTypes[] = {
    {"gpt2", "learned", "layernorm", false}, {"gpt_bigcode", "learned", "layernorm", false},
    {"llama", "rotary", "rmsnorm", true},    {"qwen2", "rotary", "rmsnorm", true},
    {"mistral", "rotary", "rmsnorm", true},  {"starcoder2", "rotary", "layernorm", false}};

std::string misfit_of_gpt2(const HfModelConfig& c, bool bigcode) {
  if (bigcode && c.num_kv_heads != 1) return "it has one key and value head";
  if (!bigcode && c.num_kv_heads != c.num_heads) return "it has as many key and value heads as heads";
  if (c.head_dim * c.num_heads != c.hidden_size) return "its heads together are as wide as the model";
  if (c.sliding_window) return "it has no window";
  if (!c.qkv_bias || !c.proj_bias || !c.linear_bias) return "it has all biases";
  return "";
}

std::string misfit_of_rotary(const HfModelConfig& c, const std::string& type) {
  if (c.rope_fraction != 1.0 || c.rope_interleaved)
    return "it rotates pairs (i, i + d/2) over the whole head";
  const bool any = c.qkv_bias || c.proj_bias || c.linear_bias,
             all = c.qkv_bias && c.proj_bias && c.linear_bias;
  if (type == "llama" && c.qkv_bias != c.proj_bias)
    return "its four projections of attention have biases, or none has";
  if (type == "mistral" && any) return "it has no biases";
  if (type == "qwen2" && (!c.qkv_bias || c.proj_bias || c.linear_bias))
    return "its biases are those of query, key and value alone";
  if (type == "starcoder2" && any != all) return "it has all biases or none";
  if (type == "llama" && c.sliding_window) return "it has no window";
  return "";
}

void write_gpt2(const HfModelConfig& config, Json& out) {
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
  if (config.model_type == "gpt_bigcode") out["multi_query"] = true;
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

void write_rotary(const HfModelConfig& config, Json& out) {
  const bool qwen = config.model_type == "qwen2", starcoder = config.model_type == "starcoder2";
  out["num_hidden_layers"] = config.num_layers;
  out["hidden_size"] = config.hidden_size;
  out["num_attention_heads"] = config.num_heads;
  out["num_key_value_heads"] = config.num_kv_heads;
  out["intermediate_size"] = config.ffn_hidden_size;
  out["max_position_embeddings"] = config.max_positions;
  out["attention_dropout"] = config.attention_dropout;
  out["head_dim"] = config.head_dim;
  if (starcoder) {
    out["norm_epsilon"] = config.norm_eps;
    out["hidden_act"] = config.activation == "gelu_tanh" ? "gelu_pytorch_tanh" : config.activation;
    out["use_bias"] = config.linear_bias;
    out["residual_dropout"] = config.dropout;
    out["embedding_dropout"] = config.embedding_dropout.value_or(config.dropout);
  } else {
    out["rms_norm_eps"] = config.norm_eps;
    out["hidden_act"] = "silu";
  }
  if (config.model_type == "llama") {
    out["attention_bias"] = config.qkv_bias;
    out["mlp_bias"] = config.linear_bias;
  }
  if (!config.sliding_window) {
    if (config.model_type == "mistral" || starcoder) out["sliding_window"] = nullptr;
  } else {
    out["sliding_window"] = *config.sliding_window;
    if (qwen) out["use_sliding_window"] = true;
    if (qwen && !out.contains("layer_types") && !out.contains("max_window_layers"))
      out["max_window_layers"] = 0;
  }
  write_rope(config, out);
}

}  // namespace

const std::vector<std::string>& hf_model_types() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const TypeFacts& type : kTypes) list.push_back(type.name);
    return list;
  }();
  return names;
}

std::string hf_misfit(const HfModelConfig& config, const std::string& model_type) {
  for (const TypeFacts& type : kTypes) {
    if (model_type != type.name) continue;
    if (config.position_embedding != type.positions)
      return detail::concat("its positions are ", type.positions, ", not ", config.position_embedding);
    if (config.norm != type.norm) return detail::concat("its norm is ", type.norm, ", not ", config.norm);
    if ((config.activation == "swiglu") != type.gated)
      return detail::concat("its MLP has ", type.gated ? "SwiGLU" : "no gate", ", not ", config.activation);
    return type.positions == std::string_view("learned") ? misfit_of_gpt2(config, model_type == "gpt_bigcode")
                                                         : misfit_of_rotary(config, model_type);
  }
  if (!model_type.empty()) return "no such type is known";
  std::string all;
  for (const TypeFacts& type : kTypes)
    all +=
        detail::concat(all.empty() ? "" : "; ", "not ", type.name, " (", hf_misfit(config, type.name), ")");
  return all;
}

std::optional<std::string> hf_model_type_of(const HfModelConfig& config) {
  if (hf_misfit(config, config.model_type).empty()) return config.model_type;
  for (const std::string& type : hf_model_types()) {
    if (hf_misfit(config, type).empty()) return type;
  }
  return std::nullopt;
}

std::string make_hf_config(const HfModelConfig& config, const std::string& base, DType dtype) {
  Json out = base.empty() ? Json::object() : parse_json(base, "config.json");
  const std::vector<std::string> known = architectures_of(config.model_type);
  const std::string misfit = hf_misfit(config, config.model_type);
  TESSERA_ENSURE(ConfigError, misfit.empty(), "this model has no Hugging Face form",
                 config.model_type.empty() ? "" : " as a " + config.model_type, ": ", misfit);
  if (!out.contains("architectures")) out["architectures"] = {known[0]};
  out["model_type"] = config.model_type;
  out["vocab_size"] = config.vocab_size;
  out["tie_word_embeddings"] = config.tied_head;
  out["initializer_range"] = config.init_std;
  if (config.padding_id) out["pad_token_id"] = *config.padding_id;
  if (out.contains("dtype")) out["dtype"] = name_of(dtype);
  if (!out.contains("dtype") || out.contains("torch_dtype")) out["torch_dtype"] = name_of(dtype);
  config.position_embedding == "learned" ? write_gpt2(config, out) : write_rotary(config, out);
  return to_text(out, 2) + "\n";
}

}  // namespace tessera
