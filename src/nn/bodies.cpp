#include "tessera/nn/bodies.hpp"

#include <algorithm>

#include "nn/models/bert.hpp"
#include "nn/models/t5.hpp"
#include "tessera/base/families.hpp"
#include "tessera/nn/models/decoder.hpp"

namespace tessera {
namespace {

template <typename M>
std::unique_ptr<Model> build(const ModelConfig& config, const Numerics& numerics, const Sharding& sharding) {
  return std::make_unique<M>(config, numerics, sharding);
}

constexpr Body kBodies[] = {{"decoder", build<Decoder>},
                            {"bert", build_bert},
                            {"megatron-bert", build_megatron_bert},
                            {"t5", build_t5}};

/// The first setting that only these models read and that is not as it is in models without it; or null.
const char* setting_of_decoders(const ModelConfig& c) {
  if (c.window_pattern) return "window_pattern";
  if (c.qk_norm.value_or(QkNorm::none) != QkNorm::none) return "qk_norm";
  if (c.norm_placement.value_or(NormPlacement::pre) != NormPlacement::pre) return "norm_placement";
  if (c.shared_norm.value_or(false)) return "shared_norm";
  if (c.norm_zero_centered.value_or(false)) return "norm_zero_centered";
  if (has_norm_bias(c) != (c.norm == NormStyle::layernorm)) return "norm_bias";
  if (c.embedding_norm.value_or(false)) return "embedding_norm";
  if (c.embedding_scaled.value_or(false)) return "embedding_scaled";
  if (c.attention_scale) return "attention_scale";
  if (c.attention_softcap.value_or(0) > 0) return "attention_softcap";
  if (c.logit_softcap.value_or(0) > 0) return "logit_softcap";
  if (c.rope_local_theta) return "rope_local_theta";
  return nullptr;
}
const char* setting_of_t5(const ModelConfig& c) {
  if (c.position_embedding == PositionKind::relative) return "position_embedding: relative";
  if (c.encoder_layers) return "encoder_layers";
  if (c.relative_buckets) return "relative_buckets";
  if (c.relative_max_distance) return "relative_max_distance";
  if (c.scaled_head.value_or(false)) return "scaled_head";
  return nullptr;
}

/// A setting that no block of a body reads would be passed over without a word.
void refuse_settings_of_others(const ModelConfig& config, std::string_view body) {
  const char* of_decoders = body == "decoder" ? nullptr : setting_of_decoders(config);
  const char* of_t5 = body == "t5" ? nullptr : setting_of_t5(config);
  const char* setting = of_decoders ? of_decoders : of_t5;
  TESSERA_ENSURE(ConfigError, setting == nullptr, "model.", setting, " is a setting of ",
                 of_decoders ? "decoders" : "t5", ", not of model.family ", config.family.name);
}

}  // namespace

std::span<const Body> bodies() { return kBodies; }

std::unique_ptr<Model> make_model(const ModelConfig& config, const Numerics& numerics,
                                  const Sharding& sharding) {
  const std::string_view name = spec_of(config.family).body;
  const auto body = std::ranges::find(kBodies, name, &Body::name);
  TESSERA_ENSURE(InternalError, body != std::end(kBodies), "family '", config.family.name, "' has the body '",
                 name, "', which nobody builds");
  refuse_settings_of_others(config, name);
  return body->build(config, numerics, sharding);
}

}  // namespace tessera
