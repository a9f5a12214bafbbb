#include <algorithm>

#include "checkpoint/hf_names.hpp"
#include "checkpoint/json_strict.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;

constexpr std::int64_t kMaxLayers = 10'000;
constexpr std::int64_t kMaxSize = std::int64_t{1} << 28;

/// What Transformers' config class of a model type has where config.json says nothing.
struct Defaults {
  std::int64_t layers, width, heads, kv_heads, ffn, vocabulary, positions;  ///< kv_heads 0: as many as heads
  std::int64_t window;                                                      ///< 0: none
};
constexpr Defaults kGpt2{12, 768, 12, 0, 0, 50257, 1024, 0};
constexpr Defaults kLlama{32, 4096, 32, 0, 11008, 32000, 2048, 0};
constexpr Defaults kMistral{32, 4096, 32, 8, 14336, 32000, 131072, 4096};
constexpr Defaults kQwen2{32, 4096, 32, 32, 22016, 151936, 32768, 4096};
constexpr Defaults kStarcoder2{30, 3072, 24, 2, 12288, 49152, 4096, 0};

/// One config.json being read, with a default for each key.
struct Reader {
  JsonView root;

  bool is_absent(const char* key) const { return !root.object().contains(key); }
  /// `alias`: the name that Transformers gives the key in every family.
  std::int64_t size(const char* key, std::int64_t absent, const char* alias = nullptr,
                    std::int64_t max = kMaxSize) const {
    if (const auto found = root.find(key)) return found->integer(1, max);
    return alias != nullptr ? size(alias, absent, nullptr, max) : absent;
  }
  double number(const char* key, double absent) const {
    const auto found = root.find(key);
    return found ? found->number() : absent;
  }
  double positive(const char* key, double absent, double most) const {
    const double value = number(key, absent);
    if (value <= 0 || value > most)
      root[key].fail(detail::concat("must be above 0 and at most ", most), kWay);
    return value;
  }
  double probability(const char* key, double absent) const {
    const double value = number(key, absent);
    if (value < 0 || value >= 1) root[key].fail("must be at least 0 and below 1", kWay);
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
  /// Refuses a key that must be absent, null, or a number that changes nothing.
  void require_absent(const char* key, const char* reason, double neutral = 0.0) const {
    const auto found = root.find(key);
    if (found && !(found->json().is_number() && found->number() == neutral)) found->fail(reason, kWay);
  }

  static constexpr const char* kWay = "Change it, or use another model.";
};

/// How a key that a message names came to its value.
const char* by_default(const Reader& in, const char* key) {
  return in.is_absent(key) ? " (Transformers' default, as the key is absent)" : "";
}

void check_rope_keys(const JsonView& scaling) {
  static constexpr const char* kKnown[] = {"rope_theta",
                                           "rope_type",
                                           "type",
                                           "factor",
                                           "low_freq_factor",
                                           "high_freq_factor",
                                           "original_max_position_embeddings",
                                           "partial_rotary_factor"};
  for (const auto& item : scaling.object().items()) {
    if (std::find(std::begin(kKnown), std::end(kKnown), item.key()) == std::end(kKnown))
      scaling.fail("\"" + item.key() + "\" is not supported", Reader::kWay);
  }
}

/// As Transformers merges the older spelling, `rope_scaling` beside `rope_theta`, with `rope_parameters`.
void read_rope(const Reader& in, HfModelConfig& config) {
  config.rope_theta = in.positive("rope_theta", 10000.0, 1e30);
  if (in.number("partial_rotary_factor", 1.0) != 1.0)
    in.root["partial_rotary_factor"].fail("is not supported; only 1.0 is",
                                          "Use a model that rotates all of each head.");
  auto scaling = in.root.find("rope_scaling");
  if (!scaling || scaling->object().empty()) scaling = in.root.find("rope_parameters");
  if (!scaling) return;
  check_rope_keys(*scaling);
  const Reader inner{*scaling};
  config.rope_theta = inner.positive("rope_theta", config.rope_theta, 1e30);
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
  if (rope.factor < 1) (*scaling)["factor"].fail("must be at least 1", Reader::kWay);
  if (rope.type == "linear") return;
  rope.low_freq_factor = (*scaling)["low_freq_factor"].number();
  rope.high_freq_factor = (*scaling)["high_freq_factor"].number();
  constexpr const char* kOriginal = "original_max_position_embeddings";
  rope.original_max_positions = in.size(kOriginal, inner.size(kOriginal, config.max_positions));
  if (rope.high_freq_factor <= rope.low_freq_factor || rope.low_freq_factor <= 0)
    scaling->fail("low_freq_factor must be positive and below high_freq_factor", Reader::kWay);
}

/// Of an MLP without a gate; an absent key is GELU by tanh, under one of its names.
std::string plain_activation(const Reader& in, const char* key) {
  const auto activation = in.root.find(key);
  const std::string name = activation ? activation->text() : "gelu_new";
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return "gelu_tanh";
  if (name != "gelu" && name != "relu")
    activation->fail(
        "\"" + name + "\" is not supported; gelu_new, gelu_pytorch_tanh, gelu_fast, gelu and relu are",
        "Use a model with one of these.");
  return name;
}

/// GPT-2, or with `bigcode` GPTBigCode: the same but for its one key and value head.
HfModelConfig read_gpt2(const Reader& in, bool bigcode) {
  HfModelConfig config;
  config.family = "gpt2";
  config.num_layers = in.size("n_layer", kGpt2.layers, "num_hidden_layers", kMaxLayers);
  config.hidden_size = in.size("n_embd", kGpt2.width, "hidden_size");
  config.num_heads = config.num_kv_heads = in.size("n_head", kGpt2.heads, "num_attention_heads");
  config.ffn_hidden_size = in.size("n_inner", 4 * config.hidden_size);
  config.vocab_size = in.size("vocab_size", kGpt2.vocabulary);
  config.max_positions = in.size("n_positions", kGpt2.positions, "max_position_embeddings");
  config.norm_eps = in.positive("layer_norm_epsilon", 1e-5, 1.0);
  config.tied_head = in.flag("tie_word_embeddings", true);
  config.qkv_bias = config.proj_bias = config.linear_bias = true;
  config.dropout = in.probability("resid_pdrop", 0.1);
  config.attention_dropout = in.probability("attn_pdrop", 0.1);
  const double embedding = in.probability("embd_pdrop", 0.1);
  if (embedding != config.dropout) config.embedding_dropout = embedding;
  config.activation = plain_activation(in, "activation_function");
  if (bigcode) {
    if (!in.flag("multi_query", true))
      in.root["multi_query"].fail("must be true or absent: all heads full make a GPT-2",
                                  "Make the model with model_type gpt2.");
    config.num_kv_heads = 1;
  }
  in.require_flag("scale_attn_weights", true);
  in.require_flag("scale_attn_by_inverse_layer_idx", false);
  in.require_flag("add_cross_attention", false);
  if (config.hidden_size % config.num_heads != 0)
    in.root.fail(detail::concat("n_embd ", config.hidden_size, by_default(in, "n_embd"),
                                " is not a multiple of n_head ", config.num_heads, by_default(in, "n_head")),
                 Reader::kWay);
  config.head_dim = config.hidden_size / config.num_heads;
  return config;
}

/// Which keys a position sees, where that can be fewer than all before it.
void read_window(const Reader& in, const std::string& model_type, const Defaults& absent,
                 HfModelConfig& config) {
  const bool qwen = model_type == "qwen2", always = model_type == "mistral" || model_type == "starcoder2",
             on = always || (qwen && in.flag("use_sliding_window", false));
  // Of a missing key Transformers takes its default, of null that there is no window.
  const bool has_window =
      on && (in.is_absent("sliding_window") ? absent.window > 0 : in.root.find("sliding_window").has_value());
  const std::int64_t window = has_window ? in.size("sliding_window", absent.window) : 0;
  const auto layers = in.root.find("layer_types");
  bool used = always || (qwen && !layers &&
                         in.number("max_window_layers", 28) < static_cast<double>(config.num_layers));
  for (std::size_t i = 0; layers && i < layers->size(); ++i) {
    const std::string& type = (*layers)[i].text();
    const bool slides = type == "sliding_attention" && qwen && has_window;
    if (type != "full_attention" && !slides)
      (*layers)[i].fail("\"" + type + "\" is not supported here; full_attention is", Reader::kWay);
    used = used || slides;
  }
  if (has_window && used) config.sliding_window = window;
}

/// torch.nn.Embedding's padding_idx, which counts from the end if it is negative.
void read_padding(const Reader& in, HfModelConfig& config) {
  const auto found = in.root.find("pad_token_id");
  if (!found) return;
  const std::int64_t id = found->integer(-config.vocab_size, kMaxSize);
  if (id >= config.vocab_size)
    found->fail(detail::concat(id, " is not below vocab_size ", config.vocab_size),
                "Transformers cannot make this model's embedding either: correct the id, or remove it.");
  config.padding_id = id < 0 ? id + config.vocab_size : id;
}

void check_llama_sizes(const Reader& in, const HfModelConfig& config) {
  if (config.num_heads % config.num_kv_heads != 0)
    in.root.fail(
        detail::concat("num_attention_heads ", config.num_heads, by_default(in, "num_attention_heads"),
                       " is not a multiple of num_key_value_heads ", config.num_kv_heads,
                       by_default(in, "num_key_value_heads")),
        Reader::kWay);
  if (!in.root.find("head_dim") && config.hidden_size % config.num_heads != 0)
    in.root.fail(detail::concat("hidden_size ", config.hidden_size, by_default(in, "hidden_size"),
                                " is not a multiple of num_attention_heads ", config.num_heads,
                                by_default(in, "num_attention_heads")),
                 Reader::kWay);
  if (config.head_dim % 2 != 0)
    in.root.fail(detail::concat("rotary heads must have even width, not ", config.head_dim), Reader::kWay);
}

void read_llama_parts(const Reader& in, const std::string& model_type, HfModelConfig& config) {
  config.norm = "rmsnorm";
  config.norm_eps = in.positive("rms_norm_eps", 1e-6, 1.0);
  config.activation = "swiglu";
  config.tied_head = in.flag("tie_word_embeddings", false);
  config.qkv_bias = model_type == "qwen2";
  if (model_type == "llama") {  // the others have the keys only by mistake, and Transformers passes over them
    config.qkv_bias = config.proj_bias = in.flag("attention_bias", false);
    config.linear_bias = in.flag("mlp_bias", false);
  }
  if (const auto activation = in.root.find("hidden_act");
      activation && activation->text() != "silu" && activation->text() != "swish")
    activation->fail("\"" + activation->text() + "\" is not supported; silu is", "Use a model with SwiGLU.");
}

void read_starcoder2_parts(const Reader& in, HfModelConfig& config) {
  config.norm_eps = in.positive("norm_epsilon", 1e-5, 1.0);
  config.activation = plain_activation(in, "hidden_act");
  config.tied_head = in.flag("tie_word_embeddings", true);
  config.qkv_bias = config.proj_bias = config.linear_bias = in.flag("use_bias", true);
  config.dropout = in.probability("residual_dropout", 0.0);
  const double embedding = in.probability("embedding_dropout", 0.0);
  if (embedding != config.dropout) config.embedding_dropout = embedding;
}

/// The decoders whose config.json has Llama's keys.
HfModelConfig read_rotary(const Reader& in, const std::string& model_type) {
  const bool starcoder = model_type == "starcoder2";
  const Defaults& absent = model_type == "mistral" ? kMistral
                           : model_type == "qwen2" ? kQwen2
                           : starcoder             ? kStarcoder2
                                                   : kLlama;
  HfModelConfig config;
  config.family = starcoder ? "gpt2" : "llama";
  config.position_embedding = "rotary";
  config.num_layers = in.size("num_hidden_layers", absent.layers, nullptr, kMaxLayers);
  config.hidden_size = in.size("hidden_size", absent.width);
  config.num_heads = in.size("num_attention_heads", absent.heads);
  const bool own_kv = in.is_absent("num_key_value_heads") && absent.kv_heads > 0;
  config.num_kv_heads = in.size("num_key_value_heads", own_kv ? absent.kv_heads : config.num_heads);
  config.ffn_hidden_size = in.size("intermediate_size", absent.ffn);
  config.vocab_size = in.size("vocab_size", absent.vocabulary);
  config.max_positions = in.size("max_position_embeddings", absent.positions);
  config.attention_dropout = in.probability("attention_dropout", 0.0);
  starcoder ? read_starcoder2_parts(in, config) : read_llama_parts(in, model_type, config);
  config.head_dim = in.size("head_dim", config.hidden_size / config.num_heads);
  check_llama_sizes(in, config);
  read_window(in, model_type, absent, config);
  read_padding(in, config);
  read_rope(in, config);
  return config;
}

/// What changes a model of every family.
void check_common(const Reader& in) {
  constexpr const char* kQuantized = "quantized weights are not supported";
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (const auto quantized = in.root.find(key))
      quantized->fail(kQuantized, "Use the float32, bfloat16 or float16 version of the model.");
  }
  in.require_flag("is_causal", true);
  in.require_flag("is_encoder_decoder", false);
  in.require_absent("chunk_size_feed_forward", "is not supported");
  for (const char* key : {"per_layer_config", "pruned_heads"}) {
    const auto found = in.root.find(key);
    if (found && !found->json().empty()) found->fail("layers that differ are not supported", Reader::kWay);
  }
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size"})
    in.require_absent(key, "is not supported");
  for (const char* key : {"logit_scale", "attention_multiplier", "embedding_multiplier",
                          "residual_multiplier", "logits_scaling"})
    in.require_absent(key, "is not supported", 1.0);
}

std::string list_of_types() {
  const std::vector<std::string>& types = hf_model_types();
  std::string text = types.front();
  for (std::size_t i = 1; i < types.size(); ++i) text += (i + 1 < types.size() ? ", " : " and ") + types[i];
  return text;
}

void check_architecture(const JsonView& root, const std::string& model_type) {
  const std::vector<std::string> known = architectures_of(model_type);
  if (known.empty())
    root["model_type"].fail("\"" + model_type + "\" is not supported; " + list_of_types() + " are",
                            "Use a model of one of these types.");
  const auto list = root.find("architectures");
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    const std::string& name = (*list)[i].text();
    if (std::find(known.begin(), known.end(), name) == known.end())
      (*list)[i].fail("\"" + name + "\" is not supported; " + known[0] + " and " + known[1] + " are",
                      "Use the language model itself, without other heads.");
  }
}

HfModelConfig read_config(const std::string& text, const std::string& origin) {
  const Json document = parse_json(text, origin, kHfFileRemedy);
  const Reader in{JsonView(document, origin, kHfFileRemedy)};
  const std::string model_type = in.root["model_type"].text();
  check_architecture(in.root, model_type);
  check_common(in);
  const bool bigcode = model_type == "gpt_bigcode";
  HfModelConfig config =
      bigcode || model_type == "gpt2" ? read_gpt2(in, bigcode) : read_rotary(in, model_type);
  config.model_type = model_type;
  config.init_std = in.positive("initializer_range", model_type == "starcoder2" ? 0.018042 : 0.02, 1e6);
  return config;
}

}  // namespace

HfModelConfig parse_architecture(const std::string& text, const std::string& origin) {
  const Json document = parse_json(text, origin, kHfFileRemedy);
  return document.contains("hf_model_type") ? parse_model_json(text, origin) : parse_hf_config(text, origin);
}

HfModelConfig parse_hf_config(const std::string& text, const std::string& origin) {
  try {
    return read_config(text, origin);
  } catch (const CheckpointError& error) {  // of the reader that checkpoints have in common with it
    throw ConfigError(error.what());
  }
}

}  // namespace tessera
