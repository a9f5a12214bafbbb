#include <algorithm>

#include "checkpoint/json_strict.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;

constexpr std::int64_t kMaxLayers = 10'000;
constexpr std::int64_t kMaxSize = std::int64_t{1} << 28;

/// One config.json being read: the first of several spellings of a key, with a default where Hugging Face has
/// one.
struct Reader {
  JsonView root;

  std::optional<JsonView> any(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      if (const auto found = root.find(key)) return found;
    }
    return std::nullopt;
  }
  std::int64_t size(std::initializer_list<const char*> keys, std::optional<std::int64_t> absent = {},
                    std::int64_t max = kMaxSize) const {
    const auto found = any(keys);
    if (found) return found->integer(1, max);
    if (!absent)
      root.fail(detail::concat("\"", *keys.begin(), "\" is missing"), "Use the model's own config.json.");
    return *absent;
  }
  double number(const char* key, double absent) const {
    const auto found = root.find(key);
    return found ? found->number() : absent;
  }
  double probability(const char* key, double absent) const {
    const double value = number(key, absent);
    if (value < 0 || value >= 1) root[key].fail("must be at least 0 and below 1");
    return value;
  }
  bool flag(const char* key, bool absent) const {
    const auto found = root.find(key);
    return found ? found->boolean() : absent;
  }
  /// Refuses an option that changes the model's maths in a way Tessera does not have.
  void require_flag(const char* key, bool wanted) const {
    if (flag(key, wanted) != wanted)
      root[key].fail(detail::concat("is not supported; it must be ", wanted ? "true" : "false", " or absent"),
                     "Use a model without this option.");
  }
};

void read_rope(const Reader& in, HfModelConfig& config) {
  config.rope_theta = in.number("rope_theta", 10000.0);
  const auto scaling = in.any({"rope_parameters", "rope_scaling"});
  if (!scaling) return;
  scaling->only({"rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
                 "original_max_position_embeddings", "partial_rotary_factor"});
  if (const auto theta = scaling->find("rope_theta")) config.rope_theta = theta->number();
  if (const auto part = scaling->find("partial_rotary_factor"); part && part->number() != 1.0)
    part->fail("is not supported; only 1.0 is", "Use a model that rotates all of each head.");
  auto type = scaling->find("rope_type");
  if (!type) type = scaling->find("type");
  if (!type || type->text() == "default") return;
  HfRopeScaling& rope = config.rope_scaling;
  rope.type = type->text();
  if (rope.type != "linear" && rope.type != "llama3")
    type->fail("\"" + rope.type + "\" is not supported; default, linear and llama3 are",
               "Use another model.");
  rope.factor = (*scaling)["factor"].number();
  if (rope.factor <= 0) (*scaling)["factor"].fail("must be positive");
  if (rope.type == "linear") return;
  rope.low_freq_factor = (*scaling)["low_freq_factor"].number();
  rope.high_freq_factor = (*scaling)["high_freq_factor"].number();
  rope.original_max_positions = (*scaling)["original_max_position_embeddings"].integer(1, kMaxSize);
  if (rope.high_freq_factor <= rope.low_freq_factor || rope.low_freq_factor <= 0)
    scaling->fail("low_freq_factor must be positive and below high_freq_factor");
}

HfModelConfig read_gpt2(const Reader& in, std::vector<std::string>& notes) {
  HfModelConfig config;
  config.family = "gpt2";
  config.num_layers = in.size({"n_layer", "num_hidden_layers"}, {}, kMaxLayers);
  config.hidden_size = in.size({"n_embd", "hidden_size"});
  config.num_heads = config.num_kv_heads = in.size({"n_head", "num_attention_heads"});
  config.ffn_hidden_size = in.size({"n_inner"}, 4 * config.hidden_size);
  config.vocab_size = in.size({"vocab_size"});
  config.max_positions = in.size({"n_positions", "max_position_embeddings", "n_ctx"});
  config.norm_eps = in.number("layer_norm_epsilon", 1e-5);
  config.tied_head = in.flag("tie_word_embeddings", true);
  config.qkv_bias = config.proj_bias = config.linear_bias = true;
  config.dropout = in.probability("resid_pdrop", 0.1);
  config.attention_dropout = in.probability("attn_pdrop", 0.1);
  if (in.probability("embd_pdrop", 0.1) != config.dropout)
    notes.push_back("embd_pdrop differs from resid_pdrop; Tessera uses resid_pdrop for both");
  const auto activation = in.any({"activation_function", "hidden_act"});
  const std::string name = activation ? activation->text() : "gelu_new";
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") {
    config.activation = "gelu_tanh";
  } else if (name == "gelu" || name == "relu") {
    config.activation = name;
  } else {
    activation->fail(
        "\"" + name + "\" is not supported; gelu_new, gelu_pytorch_tanh, gelu_fast, gelu and relu are",
        "Use a model with one of these.");
  }
  in.require_flag("scale_attn_weights", true);
  in.require_flag("scale_attn_by_inverse_layer_idx", false);
  in.require_flag("add_cross_attention", false);
  if (config.hidden_size % config.num_heads != 0)
    in.root.fail(
        detail::concat("n_embd ", config.hidden_size, " is not a multiple of n_head ", config.num_heads));
  config.head_dim = config.hidden_size / config.num_heads;
  return config;
}

void refuse_sliding_window(const Reader& in, const std::string& model_type) {
  constexpr const char* kReason = "is not supported: attention must see all earlier positions";
  constexpr const char* kWay = "Use a model without a sliding window.";
  if (model_type == "mistral" && in.root.find("sliding_window"))
    in.root["sliding_window"].fail(kReason, kWay);
  if (in.flag("use_sliding_window", false)) in.root["use_sliding_window"].fail(kReason, kWay);
  const auto layers = in.root.find("layer_types");
  for (std::size_t i = 0; layers && i < layers->size(); ++i) {
    if ((*layers)[i].text() != "full_attention")
      (*layers)[i].fail("\"" + (*layers)[i].text() + "\" is not supported; full_attention is", kWay);
  }
}

HfModelConfig read_llama(const Reader& in, const std::string& model_type) {
  HfModelConfig config;
  config.family = "llama";
  config.num_layers = in.size({"num_hidden_layers"}, {}, kMaxLayers);
  config.hidden_size = in.size({"hidden_size"});
  config.num_heads = in.size({"num_attention_heads"});
  config.num_kv_heads = in.size({"num_key_value_heads"}, config.num_heads);
  config.ffn_hidden_size = in.size({"intermediate_size"});
  config.vocab_size = in.size({"vocab_size"});
  config.max_positions = in.size({"max_position_embeddings"}, 2048);
  config.norm_eps = in.number("rms_norm_eps", 1e-6);
  config.activation = "swiglu";
  config.tied_head = in.flag("tie_word_embeddings", false);
  config.attention_dropout = in.probability("attention_dropout", 0.0);
  if (model_type == "qwen2") {
    config.qkv_bias = true;
  } else {
    config.qkv_bias = config.proj_bias = in.flag("attention_bias", false);
    config.linear_bias = in.flag("mlp_bias", false);
  }
  if (const auto activation = in.root.find("hidden_act");
      activation && activation->text() != "silu" && activation->text() != "swish")
    activation->fail("\"" + activation->text() + "\" is not supported; silu is", "Use a model with SwiGLU.");
  refuse_sliding_window(in, model_type);
  read_rope(in, config);
  if (config.num_heads % config.num_kv_heads != 0)
    in.root.fail(detail::concat("num_attention_heads ", config.num_heads,
                                " is not a multiple of num_key_value_heads ", config.num_kv_heads));
  if (!in.root.find("head_dim") && config.hidden_size % config.num_heads != 0)
    in.root.fail(detail::concat("hidden_size ", config.hidden_size,
                                " is not a multiple of num_attention_heads ", config.num_heads));
  config.head_dim = in.size({"head_dim"}, config.hidden_size / config.num_heads);
  if (config.head_dim % 2 != 0)
    in.root.fail(detail::concat("rotary heads must have even width, not ", config.head_dim));
  return config;
}

struct Known {
  const char* model_type;
  std::vector<std::string> architectures;
};
const std::vector<Known>& known_models() {
  static const std::vector<Known> known = {{"gpt2", {"GPT2LMHeadModel", "GPT2Model"}},
                                           {"llama", {"LlamaForCausalLM", "LlamaModel"}},
                                           {"mistral", {"MistralForCausalLM", "MistralModel"}},
                                           {"qwen2", {"Qwen2ForCausalLM", "Qwen2Model"}}};
  return known;
}

void check_architecture(const JsonView& root, const std::string& model_type) {
  const auto& all = known_models();
  const auto known =
      std::find_if(all.begin(), all.end(), [&](const Known& k) { return k.model_type == model_type; });
  if (known == all.end())
    root["model_type"].fail("\"" + model_type + "\" is not supported; gpt2, llama, mistral and qwen2 are",
                            "Use a model of one of these types.");
  const auto list = root.find("architectures");
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    const std::string& name = (*list)[i].text();
    if (std::find(known->architectures.begin(), known->architectures.end(), name) ==
        known->architectures.end())
      (*list)[i].fail("\"" + name + "\" is not supported; " + known->architectures[0] + " and " +
                          known->architectures[1] + " are",
                      "Use the language model itself, without other heads.");
  }
}

}  // namespace

HfModelConfig parse_hf_config(const std::string& text, const std::string& origin,
                              std::vector<std::string>* notes) {
  const Json document = parse_json(text, origin);
  const Reader in{JsonView(document, origin)};
  const std::string model_type = in.root["model_type"].text();
  check_architecture(in.root, model_type);
  if (const auto quantized = in.root.find("quantization_config"))
    quantized->fail("quantized weights are not supported",
                    "Use the float32, bfloat16 or float16 version of the model.");
  std::vector<std::string> own_notes;
  HfModelConfig config =
      model_type == "gpt2" ? read_gpt2(in, notes ? *notes : own_notes) : read_llama(in, model_type);
  config.model_type = model_type;
  if (config.norm_eps < 0) in.root.fail("the norm's epsilon is negative");
  return config;
}

namespace {

void write_gpt2(const HfModelConfig& config, Json& out) {
  TESSERA_CHECK(
      config.num_kv_heads == config.num_heads && config.head_dim * config.num_heads == config.hidden_size &&
          config.qkv_bias && config.proj_bias && config.linear_bias && config.activation != "swiglu",
      "Hugging Face's GPT-2 has all heads full, all biases and no gated activation; this model differs");
  out["n_layer"] = config.num_layers;
  out["n_embd"] = config.hidden_size;
  out["n_head"] = config.num_heads;
  out["n_positions"] = config.max_positions;
  out["n_inner"] = config.ffn_hidden_size;
  out["layer_norm_epsilon"] = config.norm_eps;
  out["activation_function"] = config.activation == "gelu_tanh" ? "gelu_new" : config.activation;
  out["resid_pdrop"] = out["embd_pdrop"] = config.dropout;
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
  const bool qwen = config.model_type == "qwen2";
  TESSERA_CHECK(config.activation == "swiglu", "Hugging Face's Llama has SwiGLU, not ", config.activation);
  TESSERA_CHECK(qwen ? config.qkv_bias && !config.proj_bias && !config.linear_bias
                     : config.qkv_bias == config.proj_bias,
                "Hugging Face's ", config.model_type, " has no such combination of biases");
  TESSERA_CHECK(config.model_type != "mistral" || (!config.qkv_bias && !config.linear_bias),
                "Hugging Face's mistral has no biases");
  TESSERA_CHECK(!qwen || config.head_dim * config.num_heads == config.hidden_size,
                "Hugging Face's qwen2 has heads of hidden_size / num_heads");
  out["num_hidden_layers"] = config.num_layers;
  out["hidden_size"] = config.hidden_size;
  out["num_attention_heads"] = config.num_heads;
  out["num_key_value_heads"] = config.num_kv_heads;
  out["intermediate_size"] = config.ffn_hidden_size;
  out["max_position_embeddings"] = config.max_positions;
  out["rms_norm_eps"] = config.norm_eps;
  out["hidden_act"] = "silu";
  out["attention_dropout"] = config.attention_dropout;
  if (!qwen) out["head_dim"] = config.head_dim;
  if (config.model_type == "llama") {
    out["attention_bias"] = config.qkv_bias;
    out["mlp_bias"] = config.linear_bias;
  }
  if (config.model_type == "mistral") out["sliding_window"] = nullptr;
  write_rope(config, out);
}

}  // namespace

std::string make_hf_config(const HfModelConfig& config, const std::string& base, DType dtype) {
  Json out = base.empty() ? Json::object() : parse_json(base, "config.json");
  const auto& all = known_models();
  const auto known =
      std::find_if(all.begin(), all.end(), [&](const Known& k) { return k.model_type == config.model_type; });
  TESSERA_CHECK(known != all.end(), "no Hugging Face model type \"", config.model_type, "\" is known");
  if (!out.contains("architectures")) out["architectures"] = {known->architectures[0]};
  out["model_type"] = config.model_type;
  out["vocab_size"] = config.vocab_size;
  out["tie_word_embeddings"] = config.tied_head;
  if (out.contains("dtype")) out["dtype"] = name_of(dtype);
  if (!out.contains("dtype") || out.contains("torch_dtype")) out["torch_dtype"] = name_of(dtype);
  config.family == "gpt2" ? write_gpt2(config, out) : write_llama(config, out);
  return to_text(out, 2) + "\n";
}

}  // namespace tessera
