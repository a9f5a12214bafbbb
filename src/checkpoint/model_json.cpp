#include <initializer_list>

#include "checkpoint/json_strict.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

std::string one_of(const JsonView& in, const char* key, std::initializer_list<const char*> known,
                   const char* absent) {
  const auto found = in.find(key);
  if (!found) return absent;
  for (const char* name : known) {
    if (found->text() == name) return name;
  }
  found->fail("\"" + found->text() + "\" is not known");
}

}  // namespace

std::string to_model_json(const HfModelConfig& config) {
  Json out = {{"family", config.family},         {"hf_model_type", config.model_type},
              {"num_layers", config.num_layers}, {"hidden_size", config.hidden_size},
              {"num_heads", config.num_heads},   {"num_kv_heads", config.num_kv_heads},
              {"head_dim", config.head_dim},     {"ffn_hidden_size", config.ffn_hidden_size},
              {"vocab_size", config.vocab_size}, {"max_positions", config.max_positions},
              {"norm_eps", config.norm_eps},     {"activation", config.activation},
              {"tied_head", config.tied_head},   {"qkv_bias", config.qkv_bias},
              {"proj_bias", config.proj_bias},   {"linear_bias", config.linear_bias},
              {"dropout", config.dropout},       {"attention_dropout", config.attention_dropout},
              {"init_std", config.init_std}};
  if (config.embedding_dropout) out["embedding_dropout"] = *config.embedding_dropout;
  if (config.sliding_window) out["sliding_window"] = *config.sliding_window;
  if (config.padding_id) out["padding_id"] = *config.padding_id;
  if (config.model_type.empty()) out["hf_model_type"] = nullptr;
  out["position_embedding"] = config.position_embedding;
  out["norm"] = config.norm;
  if (config.position_embedding == "rotary") {
    const HfRopeScaling& rope = config.rope_scaling;
    out["rope_fraction"] = config.rope_fraction;
    out["rope_interleaved"] = config.rope_interleaved;
    out["rope_theta"] = config.rope_theta;
    out["rope_scaling"] = nullptr;
    if (rope.type != "none") out["rope_scaling"] = {{"type", rope.type}, {"factor", rope.factor}};
    if (rope.type == "llama3") {
      out["rope_scaling"]["low_freq_factor"] = rope.low_freq_factor;
      out["rope_scaling"]["high_freq_factor"] = rope.high_freq_factor;
      out["rope_scaling"]["original_max_positions"] = rope.original_max_positions;
    }
  }
  return to_text(out, 2);
}

HfModelConfig parse_model_json(const std::string& text, const std::string& origin) {
  const Json document = parse_json(text, origin);
  const JsonView in(document, origin);
  in.only({"family",       "hf_model_type",     "num_layers",      "hidden_size",     "num_heads",
           "num_kv_heads", "head_dim",          "activation",      "ffn_hidden_size", "vocab_size",
           "tied_head",    "max_positions",     "norm_eps",        "qkv_bias",        "proj_bias",
           "linear_bias",  "rope_theta",        "rope_scaling",    "dropout",         "attention_dropout",
           "init_std",     "embedding_dropout", "sliding_window",  "padding_id",      "position_embedding",
           "norm",         "rope_fraction",     "rope_interleaved"});
  const auto size = [&](const char* key) { return in[key].integer(1, std::int64_t{1} << 28); };
  HfModelConfig config;
  config.family = in["family"].text();
  if (config.family != "gpt2" && config.family != "llama") in["family"].fail("must be gpt2 or llama");
  if (const auto type = in.find("hf_model_type")) config.model_type = type->text();
  config.num_layers = in["num_layers"].integer(1, 10'000);
  config.hidden_size = size("hidden_size");
  config.num_heads = size("num_heads");
  config.num_kv_heads = size("num_kv_heads");
  config.head_dim = size("head_dim");
  config.ffn_hidden_size = size("ffn_hidden_size");
  config.vocab_size = size("vocab_size");
  config.max_positions = size("max_positions");
  config.norm_eps = in["norm_eps"].number();
  config.activation = in["activation"].text();
  config.tied_head = in["tied_head"].boolean();
  config.qkv_bias = in["qkv_bias"].boolean();
  config.proj_bias = in["proj_bias"].boolean();
  config.linear_bias = in["linear_bias"].boolean();
  config.dropout = in["dropout"].number();
  config.attention_dropout = in["attention_dropout"].number();
  // Folders of earlier versions lack these.
  const bool gpt2 = config.family == "gpt2";
  config.position_embedding =
      one_of(in, "position_embedding", {"learned", "rotary", "alibi", "none"}, gpt2 ? "learned" : "rotary");
  config.norm = one_of(in, "norm", {"layernorm", "rmsnorm"}, gpt2 ? "layernorm" : "rmsnorm");
  if (const auto std = in.find("init_std")) config.init_std = std->number();
  if (const auto dropout = in.find("embedding_dropout")) config.embedding_dropout = dropout->number();
  if (const auto window = in.find("sliding_window")) config.sliding_window = window->integer(1);
  if (const auto id = in.find("padding_id")) config.padding_id = id->integer();
  if (config.position_embedding != "rotary") return config;
  if (const auto fraction = in.find("rope_fraction")) {
    config.rope_fraction = fraction->number();
    if (config.rope_fraction <= 0 || config.rope_fraction > 1)
      fraction->fail("must be above 0 and at most 1");
  }
  if (const auto interleaved = in.find("rope_interleaved")) config.rope_interleaved = interleaved->boolean();
  config.rope_theta = in["rope_theta"].number();
  if (const auto scaling = in.find("rope_scaling")) {
    scaling->only({"type", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"});
    HfRopeScaling& rope = config.rope_scaling;
    rope.type = (*scaling)["type"].text();
    if (rope.type != "linear" && rope.type != "llama3") (*scaling)["type"].fail("must be linear or llama3");
    rope.factor = (*scaling)["factor"].number();
    if (rope.type == "llama3") {
      rope.low_freq_factor = (*scaling)["low_freq_factor"].number();
      rope.high_freq_factor = (*scaling)["high_freq_factor"].number();
      rope.original_max_positions = (*scaling)["original_max_positions"].integer(1);
    }
  }
  return config;
}

}  // namespace tessera
