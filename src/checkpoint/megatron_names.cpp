#include "checkpoint/megatron_names.hpp"

#include <algorithm>
#include <array>
#include <charconv>

#include "tessera/base/families.hpp"

namespace tessera::checkpoint_detail {
namespace {

constexpr std::string_view kDecoderLayers = "decoder.layers.", kEncoderLayers = "encoder.layers.";

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
/// Of a decoder that reads an encoder: what else its layers have. A norm goes by its place, so what follows
/// the attention to itself is before another one.
constexpr std::array kReadingNames = {Pair{"inter_attention.query.", "cross_attention.linear_q."},
                                      Pair{"inter_attention.key_value.", "cross_attention.linear_kv."},
                                      Pair{"inter_attention.dense.", "cross_attention.linear_proj."},
                                      Pair{"cross_attention.linear_q.", "cross_attention.linear_q."},
                                      Pair{"cross_attention.linear_kv.", "cross_attention.linear_kv."},
                                      Pair{"cross_attention.linear_proj.", "cross_attention.linear_proj."},
                                      Pair{"post_attention_layernorm.", "pre_cross_attn_layernorm."},
                                      Pair{"post_attention_norm.", "pre_cross_attn_layernorm."},
                                      Pair{"pre_cross_attn_layernorm.", "pre_cross_attn_layernorm."},
                                      Pair{"post_inter_attention_layernorm.", "pre_mlp_layernorm."},
                                      Pair{"post_inter_attention_norm.", "pre_mlp_layernorm."}};
/// Whole names beside the layers of two stacks, before those of one.
constexpr std::array kTwoStackNames = {
    Pair{"encoder.final_layernorm.weight", "encoder.final_layernorm.weight"},
    Pair{"encoder.final_layernorm.bias", "encoder.final_layernorm.bias"},
    Pair{"encoder.final_norm.weight", "encoder.final_layernorm.weight"},
    Pair{"encoder.final_norm.bias", "encoder.final_layernorm.bias"},
    Pair{"lm_head.bias", "output_layer.bias"},
    Pair{"lm_head.output_layer.bias", "output_layer.bias"}};
/// Megatron Core's T5 has two of its modules once more.
constexpr std::array kSecondNames = {
    Pair{"position_embeddings.weight", "embedding.position_embeddings.weight"},
    Pair{"output_layer.bias", "output_layer.bias"}};
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

MegatronStacks stacks_of(const ModelConfig& model) {
  const std::string_view body = spec_of(model.family).body;
  if (body == "megatron_t5") return MegatronStacks::both;
  return body == "megatron-bert" ? MegatronStacks::encoder : MegatronStacks::decoder;
}

bool reads_encoder(std::string_view name) {
  return name.find("inter_attention.") != std::string_view::npos ||
         name.find("cross_attention.") != std::string_view::npos;
}

std::optional<MegatronName> megatron_name(std::string_view name, bool two_stacks) {
  while (drop(name, "module.")) continue;
  if (holds_nothing(name)) return MegatronName{"", true, false};
  drop(name, "language_model.");
  const bool encoder = two_stacks && name.starts_with("encoder.");
  std::string in_stack;
  for (const char* stack : kStacks) {
    if (!drop(name, stack)) continue;
    in_stack = encoder ? "encoder." : "decoder.";
    break;
  }
  const std::string whole = in_stack + std::string(name);
  const auto found = [&](const auto& table) -> const Pair* {
    const auto it =
        std::find_if(table.begin(), table.end(), [&](const Pair& each) { return each.theirs == whole; });
    return it == table.end() ? nullptr : &*it;
  };
  if (const Pair* second = two_stacks ? found(kSecondNames) : nullptr)
    return MegatronName{std::string(second->ours), false, false, true};
  const Pair* beside = two_stacks ? found(kTwoStackNames) : nullptr;
  if (!beside) beside = found(kOtherNames);
  if (beside) return MegatronName{std::string(beside->ours), false, beside->ours == "output_layer.weight"};
  const LayerName layer = layer_name(whole);
  if (layer.layer < 0) return std::nullopt;
  const auto in_layer = [&](const auto& table) -> std::optional<MegatronName> {
    for (const Pair& pair : table) {
      std::string_view rest = layer.rest;
      if (drop(rest, pair.theirs) && is_value(rest))
        return MegatronName{
            full_name({layer.layer, std::string(pair.ours) + std::string(rest), layer.encoder}), false,
            false};
    }
    return std::nullopt;
  };
  if (two_stacks && !encoder) {
    if (const auto name_of_it = in_layer(kReadingNames)) return name_of_it;
  }
  return in_layer(kLayerNames);
}

bool has_weight_decay(std::string_view name, std::size_t dimensions) {
  return !name.ends_with(".bias") && dimensions > 1;
}

TensorSplit tensor_split(std::string_view ours) {
  if (ours == "embedding.word_embeddings.weight" || ours.starts_with("output_layer.") ||
      ours == "lm_head.bias")
    return TensorSplit::vocabulary;
  if (ours.find("cross_attention.linear_q.") != std::string_view::npos) return TensorSplit::rows;
  if (ours.find("cross_attention.linear_kv.") != std::string_view::npos) return TensorSplit::key_value;
  if (ours.find("linear_qkv.") != std::string_view::npos) return TensorSplit::query_key_value;
  if (ours.find("linear_fc1.") != std::string_view::npos) return TensorSplit::gate_up;
  if (ours.ends_with("linear_proj.weight") || ours.ends_with("linear_fc2.weight"))
    return TensorSplit::columns;
  return TensorSplit::none;
}

LayerName layer_name(std::string_view ours) {
  LayerName name{-1, std::string(ours), false};
  std::string_view rest = ours;
  const bool encoder = drop(rest, kEncoderLayers);
  if (!encoder && !drop(rest, kDecoderLayers)) return name;
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc() || number < 0 || end == rest.data() + rest.size() || *end != '.') return name;
  return {number, std::string(end + 1, rest.data() + rest.size()), encoder};
}

std::string full_name(const LayerName& name) {
  if (name.layer < 0) return name.rest;
  return std::string(name.encoder ? kEncoderLayers : kDecoderLayers) + std::to_string(name.layer) + "." +
         name.rest;
}

std::string zero_filled(std::int64_t value, std::size_t width) {
  const std::string text = std::to_string(value);
  return std::string(text.size() < width ? width - text.size() : 0, '0') + text;
}

std::string rank_folder(std::int64_t tp, std::optional<std::int64_t> pp) {
  return "mp_rank_" + zero_filled(tp, 2) + (pp ? "_" + zero_filled(*pp, 3) : "");
}

namespace {

/// In the model that Megatron-LM had before Megatron Core.
std::vector<std::string> legacy_path(const LayerName& name, const std::string& module,
                                     const std::string& value, bool two_stacks) {
  if (name.layer < 0) {
    if (module == "embedding.token_type_embeddings")
      return {"language_model", "embedding", "tokentype_embeddings", value};
    if (module == "pooler.dense") return {"language_model", "pooler", "dense." + value};
    if (module == "binary_head") return {"binary_head", value};
    if (name.rest.starts_with("lm_head."))
      return {"lm_head", name.rest.substr(std::string_view("lm_head.").size())};
    if (two_stacks && name.rest == "output_layer.bias") return {"lm_head", "bias"};
    if (module == "embedding.word_embeddings" || module == "embedding.position_embeddings")
      return {"language_model", "embedding", module.substr(module.find('.') + 1), value};
    if (module == "encoder.final_layernorm") return {"language_model", "encoder", "final_layernorm." + value};
    if (module == "decoder.final_layernorm")
      return {"language_model", two_stacks ? "decoder" : "encoder", "final_layernorm." + value};
    return {"language_model", "output_layer", value};
  }
  constexpr std::array kLegacy = {Pair{"self_attention.linear_qkv", "self_attention.query_key_value"},
                                  Pair{"self_attention.linear_proj", "self_attention.dense"},
                                  Pair{"cross_attention.linear_q", "inter_attention.query"},
                                  Pair{"cross_attention.linear_kv", "inter_attention.key_value"},
                                  Pair{"cross_attention.linear_proj", "inter_attention.dense"},
                                  Pair{"pre_cross_attn_layernorm", "post_attention_layernorm"},
                                  Pair{"mlp.linear_fc1", "mlp.dense_h_to_4h"},
                                  Pair{"mlp.linear_fc2", "mlp.dense_4h_to_h"}};
  std::string theirs = module;
  for (const Pair& pair : kLegacy) {
    if (module == pair.theirs) theirs = pair.ours;
  }
  const bool reads = two_stacks && !name.encoder;
  if (module == "pre_mlp_layernorm")
    theirs = reads ? "post_inter_attention_layernorm" : "post_attention_layernorm";
  return {"language_model", reads ? "decoder" : "encoder",
          "layers." + std::to_string(name.layer) + "." + theirs + "." + value};
}

}  // namespace

const char* second_name(MegatronStacks stacks, std::string_view ours) {
  for (const Pair& pair : kSecondNames) {
    if (stacks == MegatronStacks::both && pair.ours == ours) return pair.theirs.data();
  }
  return nullptr;
}

std::vector<std::string> megatron_path(MegatronExportOptions::Names names, const LayerName& name,
                                       MegatronStacks stacks) {
  using Names = MegatronExportOptions::Names;
  const std::size_t dot = name.rest.rfind('.');
  const std::string module = name.rest.substr(0, dot), value = name.rest.substr(dot + 1);
  if (names == Names::legacy) return legacy_path(name, module, value, stacks == MegatronStacks::both);
  LayerName theirs = name;
  if (stacks == MegatronStacks::encoder) theirs.encoder = true;
  if (stacks == MegatronStacks::encoder && module == "decoder.final_layernorm")
    theirs.rest = "encoder.final_layernorm." + value;
  if (name.rest == "lm_head.bias") theirs.rest = "output_layer.bias";
  if (name.rest == "output_layer.bias") theirs.rest = "lm_head.output_layer.bias";
  if (module == "lm_head.layernorm") theirs.rest = "lm_head.layer_norm." + value;
  if (module == "embedding.token_type_embeddings") theirs.rest = "embedding.tokentype_embeddings." + value;
  if (name.layer >= 0 && names == Names::transformer_engine) {
    if (module == "input_layernorm") theirs.rest = "self_attention.linear_qkv.layer_norm_" + value;
    if (module == "pre_mlp_layernorm") theirs.rest = "mlp.linear_fc1.layer_norm_" + value;
  }
  return {full_name(theirs)};
}

}  // namespace tessera::checkpoint_detail
