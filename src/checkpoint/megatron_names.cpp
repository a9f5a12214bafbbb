#include "checkpoint/megatron_names.hpp"

#include <array>
#include <charconv>

namespace tessera::checkpoint_detail {
namespace {

constexpr std::string_view kLayers = "decoder.layers.";

struct Pair {
  std::string_view theirs, ours;
};
/// Beginnings of names within a layer. Of several that fit the first one counts.
constexpr std::array kLayerNames = {Pair{"self_attention.linear_qkv.layer_norm_", "input_layernorm."},
                                    Pair{"self_attention.layernorm_qkv.layer_norm_", "input_layernorm."},
                                    Pair{"self_attention.layernorm_qkv.", "self_attention.linear_qkv."},
                                    Pair{"mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."},
                                    Pair{"layernorm_mlp.layer_norm_", "pre_mlp_layernorm."},
                                    Pair{"layernorm_mlp.fc1_", "mlp.linear_fc1."},
                                    Pair{"layernorm_mlp.fc2_", "mlp.linear_fc2."},
                                    Pair{"self_attention.query_key_value.", "self_attention.linear_qkv."},
                                    Pair{"attention.query_key_value.", "self_attention.linear_qkv."},
                                    Pair{"self_attention.dense.", "self_attention.linear_proj."},
                                    Pair{"attention.dense.", "self_attention.linear_proj."},
                                    Pair{"self_attention.proj.", "self_attention.linear_proj."},
                                    Pair{"self_attention.linear_qkv.", "self_attention.linear_qkv."},
                                    Pair{"self_attention.linear_proj.", "self_attention.linear_proj."},
                                    Pair{"mlp.dense_h_to_4h.", "mlp.linear_fc1."},
                                    Pair{"mlp.dense_4h_to_h.", "mlp.linear_fc2."},
                                    Pair{"mlp.linear_fc1.", "mlp.linear_fc1."},
                                    Pair{"mlp.linear_fc2.", "mlp.linear_fc2."},
                                    Pair{"input_layernorm.", "input_layernorm."},
                                    Pair{"input_norm.", "input_layernorm."},
                                    Pair{"post_attention_layernorm.", "pre_mlp_layernorm."},
                                    Pair{"post_attention_norm.", "pre_mlp_layernorm."},
                                    Pair{"pre_mlp_layernorm.", "pre_mlp_layernorm."}};
/// Whole names beside the layers.
constexpr std::array kOtherNames = {
    Pair{"embedding.word_embeddings.weight", "embedding.word_embeddings.weight"},
    Pair{"embedding.position_embeddings.weight", "embedding.position_embeddings.weight"},
    Pair{"decoder.final_layernorm.weight", "decoder.final_layernorm.weight"},
    Pair{"decoder.final_layernorm.bias", "decoder.final_layernorm.bias"},
    Pair{"decoder.final_norm.weight", "decoder.final_layernorm.weight"},
    Pair{"decoder.final_norm.bias", "decoder.final_layernorm.bias"},
    Pair{"embedding.tokentype_embeddings.weight", "embedding.token_type_embeddings.weight"},
    Pair{"pooler.dense.weight", "pooler.dense.weight"},
    Pair{"pooler.dense.bias", "pooler.dense.bias"},
    Pair{"lm_head.dense.weight", "lm_head.dense.weight"},
    Pair{"lm_head.dense.bias", "lm_head.dense.bias"},
    Pair{"lm_head.layernorm.weight", "lm_head.layernorm.weight"},
    Pair{"lm_head.layernorm.bias", "lm_head.layernorm.bias"},
    Pair{"lm_head.norm.weight", "lm_head.layernorm.weight"},
    Pair{"lm_head.norm.bias", "lm_head.layernorm.bias"},
    Pair{"lm_head.layer_norm.weight", "lm_head.layernorm.weight"},
    Pair{"lm_head.layer_norm.bias", "lm_head.layernorm.bias"},
    Pair{"lm_head.bias", "lm_head.bias"},
    Pair{"output_layer.bias", "lm_head.bias"},
    Pair{"binary_head.weight", "binary_head.weight"},
    Pair{"binary_head.bias", "binary_head.bias"},
    Pair{"output_layer.weight", "output_layer.weight"},
    Pair{"word_embeddings_for_head.weight", "output_layer.weight"}};
/// What the stack of layers was called.
constexpr std::array kStacks = {"transformer.", "encoder.", "decoder."};

bool drop(std::string_view& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  return true;
}

bool holds_nothing(std::string_view name) {
  return name.ends_with("_extra_state") || name.ends_with("rotary_pos_emb.inv_freq") ||
         name.ends_with("rotary_emb.inv_freq");
}

/// "weight" or "bias".
bool is_value(std::string_view name) { return name == "weight" || name == "bias"; }

}  // namespace

std::optional<MegatronName> megatron_name(std::string_view name) {
  while (drop(name, "module.")) continue;
  if (holds_nothing(name)) return MegatronName{"", true, false};
  drop(name, "language_model.");
  std::string in_stack;
  for (const char* stack : kStacks) {
    if (!drop(name, stack)) continue;
    in_stack = "decoder.";
    break;
  }
  const std::string whole = in_stack + std::string(name);
  for (const Pair& pair : kOtherNames) {
    if (whole == pair.theirs)
      return MegatronName{std::string(pair.ours), false, pair.ours == "output_layer.weight"};
  }
  const LayerName layer = layer_name(whole);
  if (layer.layer < 0) return std::nullopt;
  for (const Pair& pair : kLayerNames) {
    std::string_view rest = layer.rest;
    if (drop(rest, pair.theirs) && is_value(rest))
      return MegatronName{with_layer(layer.layer, std::string(pair.ours) + std::string(rest)), false, false};
  }
  return std::nullopt;
}

bool has_weight_decay(std::string_view name, std::size_t dimensions) {
  return !name.ends_with(".bias") && dimensions > 1;
}

TensorSplit tensor_split(std::string_view ours) {
  if (ours == "embedding.word_embeddings.weight" || ours == "output_layer.weight" || ours == "lm_head.bias")
    return TensorSplit::vocabulary;
  if (ours.find("linear_qkv.") != std::string_view::npos) return TensorSplit::query_key_value;
  if (ours.find("linear_fc1.") != std::string_view::npos) return TensorSplit::gate_up;
  if (ours.ends_with("linear_proj.weight") || ours.ends_with("linear_fc2.weight"))
    return TensorSplit::columns;
  return TensorSplit::none;
}

LayerName layer_name(std::string_view ours) {
  LayerName name{-1, std::string(ours)};
  std::string_view rest = ours;
  if (!drop(rest, kLayers)) return name;
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc() || number < 0 || end == rest.data() + rest.size() || *end != '.') return name;
  return {number, std::string(end + 1, rest.data() + rest.size())};
}

std::string with_layer(std::int64_t layer, std::string_view rest) {
  return std::string(kLayers) + std::to_string(layer) + "." + std::string(rest);
}

std::string zero_filled(std::int64_t value, std::size_t width) {
  const std::string text = std::to_string(value);
  return std::string(text.size() < width ? width - text.size() : 0, '0') + text;
}

std::string rank_folder(std::int64_t tp, std::optional<std::int64_t> pp) {
  return "mp_rank_" + zero_filled(tp, 2) + (pp ? "_" + zero_filled(*pp, 3) : "");
}

std::vector<std::string> megatron_path(MegatronExportOptions::Names names, const LayerName& name) {
  using Names = MegatronExportOptions::Names;
  const bool legacy = names == Names::legacy;
  const std::size_t dot = name.rest.rfind('.');
  const std::string module = name.rest.substr(0, dot), value = name.rest.substr(dot + 1);
  if (name.layer < 0) {
    if (!legacy) return {name.rest};
    if (module == "embedding.token_type_embeddings")
      return {"language_model", "embedding", "tokentype_embeddings", value};
    if (module == "pooler.dense") return {"language_model", "pooler", "dense." + value};
    if (module == "binary_head") return {"binary_head", value};
    if (name.rest.starts_with("lm_head."))
      return {"lm_head", name.rest.substr(std::string_view("lm_head.").size())};
    if (module == "embedding.word_embeddings" || module == "embedding.position_embeddings")
      return {"language_model", "embedding", module.substr(module.find('.') + 1), value};
    if (module == "decoder.final_layernorm") return {"language_model", "encoder", "final_layernorm." + value};
    return {"language_model", "output_layer", value};
  }
  const std::string number = "layers." + std::to_string(name.layer) + ".";
  if (legacy) {
    constexpr std::array kLegacy = {Pair{"self_attention.linear_qkv", "self_attention.query_key_value"},
                                    Pair{"self_attention.linear_proj", "self_attention.dense"},
                                    Pair{"mlp.linear_fc1", "mlp.dense_h_to_4h"},
                                    Pair{"mlp.linear_fc2", "mlp.dense_4h_to_h"},
                                    Pair{"pre_mlp_layernorm", "post_attention_layernorm"}};
    std::string theirs = module;
    for (const Pair& pair : kLegacy) {
      if (module == pair.theirs) theirs = pair.ours;
    }
    return {"language_model", "encoder", number + theirs + "." + value};
  }
  if (names == Names::transformer_engine) {
    if (module == "input_layernorm")
      return {"decoder." + number + "self_attention.linear_qkv.layer_norm_" + value};
    if (module == "pre_mlp_layernorm") return {"decoder." + number + "mlp.linear_fc1.layer_norm_" + value};
  }
  return {"decoder." + number + name.rest};
}

}  // namespace tessera::checkpoint_detail
