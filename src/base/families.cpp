#include "tessera/base/families.hpp"

#include <algorithm>

#include "base/families/rows.hpp"

namespace tessera {
namespace {

/// The first setting that only these models read and that is not as it is in models without it; or null.
const char* setting_of_decoders(const ModelConfig& c) {
  if (c.sliding_window) return "sliding_window";
  if (c.window_pattern) return "window_pattern";
  if (c.qk_norm != QkNorm::none) return "qk_norm";
  if (c.norm_placement != NormPlacement::pre) return "norm_placement";
  if (c.shared_norm) return "shared_norm";
  if (c.norm_zero_centered) return "norm_zero_centered";
  if (has_norm_bias(c) != (c.norm == NormStyle::layernorm)) return "norm_bias";
  if (c.embedding_norm) return "embedding_norm";
  if (c.embedding_scaled) return "embedding_scaled";
  if (c.attention_scale) return "attention_scale";
  if (c.attention_softcap > 0) return "attention_softcap";
  if (c.logit_softcap > 0) return "logit_softcap";
  if (c.rope_local_theta) return "rope_local_theta";
  if (c.num_experts) return "num_experts";
  return nullptr;
}
const char* setting_of_t5(const ModelConfig& c) {
  if (c.position_embedding == PositionKind::relative) return "position_embedding: relative";
  if (c.relative_buckets) return "relative_buckets";
  if (c.relative_max_distance) return "relative_max_distance";
  if (c.scaled_head.value_or(false)) return "scaled_head";
  return nullptr;
}

}  // namespace

std::span<const ModelSpec> families() {
  using namespace rows;
  static const std::vector<ModelSpec> table = {
      gpt2(),   gpt_bigcode(),   llama(),     qwen2(),  mistral(),     starcoder2(), gpt_neox(),
      bert(),   megatron_bert(), qwen3(),     gemma2(), gemma3_text(), bloom(),      t5(),
      mt5(),    megatron_t5(),   phi3(),      glm(),    glm4(),        olmo2(),      mpt(),
      falcon(), mixtral(),       qwen3_moe(), olmoe()};
  return table;
}

const ModelSpec* find_spec(std::string_view name) {
  const auto table = families();
  const auto it =
      std::find_if(table.begin(), table.end(), [&](const ModelSpec& row) { return name == row.name; });
  return it == table.end() ? nullptr : &*it;
}

const ModelSpec& spec_of(Family family) {
  const ModelSpec* row = find_spec(family.name);
  TESSERA_CHECK(row != nullptr && row->is_family(), "there is no family '", family.name, "'");
  return *row;
}

std::string setting_of_others(const ModelConfig& config) {
  const std::string_view body = spec_of(config.family).body;
  const bool encoder_decoder = spec_of(config.family).encoder_decoder;
  const char* of_decoders = body == "decoder" ? nullptr : setting_of_decoders(config);
  const char* of_t5 = body == "t5"                                ? nullptr
                      : config.encoder_layers && !encoder_decoder ? "encoder_layers"
                                                                  : setting_of_t5(config);
  if (!of_decoders && !of_t5) return {};
  return detail::concat("model.", of_decoders ? of_decoders : of_t5, " is a setting of ",
                        of_decoders ? "decoders" : "t5", ", not of model.family ", config.family.name);
}

}  // namespace tessera
