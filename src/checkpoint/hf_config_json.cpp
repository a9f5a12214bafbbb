#include "checkpoint/hf_rules.hpp"
#include "checkpoint/json_strict.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

std::string misfit_of(const ModelConfig& c, const ModelSpec& type) {
  const ModelConfig& own = type.model;
  if (std::string_view(spec_of(c.family).body) != spec_of(type.family).body) return "its layers are others";
  const auto gated = [](const ModelConfig& model) { return is_gated(*model.activation); };
  if (c.position_embedding != own.position_embedding)
    return detail::concat("its positions are ", name_of(*own.position_embedding), ", not ",
                          name_of(*c.position_embedding));
  if (c.norm != own.norm)
    return detail::concat("its norm is ", name_of(*own.norm), ", not ", name_of(*c.norm));
  const auto& listed = type.activations.names;
  const bool known = std::any_of(listed.begin(), listed.end(),
                                 [&](const auto& each) { return each.value == *c.activation; });
  if (gated(c) != gated(own) && !known)
    return detail::concat("its MLP has ", gated(own) ? "SwiGLU" : "no gate", ", not ",
                          name_of(*c.activation));
  if (*c.parallel_residual && !*own.parallel_residual) return "its attention and MLP follow one another";
  if (c.position_embedding == PositionKind::rotary &&
      (c.rope_interleaved || (c.rope_fraction != 1.0 && !type.rope.partial)))
    return "it rotates pairs (i, i + d/2) over the whole head";
  for (const HfNeed& need : type.needs) {
    if (!need.holds(c)) return need.reason;
  }
  return "";
}

void write_key(const ModelConfig& model, const HfKey& key, Json& out) {
  const auto write = [&]<typename T>(const T& value) { out[key.key] = value; };
  std::visit(
      [&](auto field) {
        const auto& value = model.*field;
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::optional<double>>) {
          write(value.value_or(model.dropout));  // that of embeddings
        } else if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::optional<std::int64_t>>) {
          write(value.value_or(0));
        } else if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::optional<bool>>) {
          write(value.value_or(*model.linear_bias));  // that of the projection
        } else {
          write(value);
        }
      },
      key.field);
}

void write_activation(const ModelConfig& model, const HfActivations& known, Json& out) {
  for (const auto& [name, value] : known.names) {
    if (value != model.activation) continue;
    out[known.key] = value == MlpActivation::gelu_tanh ? known.gelu_tanh : name;
    return;
  }
}

/// Which of the row's architectures has the model's head.
std::size_t head_of(const ModelConfig& model, const ModelSpec& row) {
  if (!row.heads_by_architecture) return 0;
  return model.num_labels ? 2 : model.binary_head.value_or(true) ? 0 : 1;
}

/// Names of classes, unless there are as many already.
void write_classes(std::int64_t count, Json& out) {
  if (out.contains("id2label") && static_cast<std::int64_t>(out["id2label"].size()) == count) return;
  out["id2label"] = out["label2id"] = Json::object();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string name = "LABEL_" + std::to_string(i);
    out["id2label"][std::to_string(i)] = name;
    out["label2id"][name] = i;
  }
}

/// To Transformers a T5 whose config.json says that the head is not tied is one whose head is not scaled.
void write_scaled_head(bool scaled, Json& out) {
  out["tie_word_embeddings"] = scaled;
  if (out.contains("scale_decoder_outputs")) out["scale_decoder_outputs"] = scaled;
  for (const char* derived : {"is_gated_act", "dense_act_fn"}) out.erase(derived);
  out["is_encoder_decoder"] = true;
}

void write_window(const ModelConfig& model, const HfWindow& window, Json& out) {
  using Use = HfWindow::Use;
  if (!model.sliding_window) {
    if (window.use == Use::always) out["sliding_window"] = nullptr;
    return;
  }
  out["sliding_window"] = *model.sliding_window;
  if (window.use != Use::by_switch) return;
  out["use_sliding_window"] = true;
  if (!out.contains("layer_types") && !out.contains("max_window_layers")) out["max_window_layers"] = 0;
}

void write_rope(const ModelConfig& model, const HfRope& keys, Json& out) {
  const RopeScaling& rope = model.rope_scaling;
  Json scaling = nullptr;
  if (rope != RopeScaling{})
    scaling = {{"rope_type", is_linear(rope) ? "linear" : "llama3"}, {"factor", rope.factor}};
  if (rope != RopeScaling{} && !is_linear(rope)) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
    scaling["original_max_position_embeddings"] = rope.original_max_positions;
  }
  // Both spellings, so that Transformers 4 and 5 read the same model.
  out[keys.theta] = model.rope_theta;
  out["rope_scaling"] = scaling;
  if (keys.partial) out[keys.fraction] = model.rope_fraction;
  if (scaling.is_null()) scaling = {{"rope_type", "default"}};
  scaling["rope_theta"] = model.rope_theta;
  if (keys.partial) scaling["partial_rotary_factor"] = model.rope_fraction;
  out["rope_parameters"] = scaling;
}

}  // namespace

namespace checkpoint_detail {

ModelConfig canonical(ModelConfig model) {
  model = resolve(std::move(model));
  model.init_from.reset();
  model.reinitialize = false;
  if (model.proj_bias == model.linear_bias) model.proj_bias.reset();
  if (model.embedding_dropout == model.dropout) model.embedding_dropout.reset();
  if (model.rope_scaling.factor == 1.0) model.rope_scaling = {};
  if (model.position_embedding != PositionKind::rotary) {
    const ModelConfig none;
    model.rope_theta = none.rope_theta;
    model.rope_fraction = none.rope_fraction;
    model.rope_interleaved = none.rope_interleaved;
    model.rope_scaling = none.rope_scaling;
  }
  return model;
}

}  // namespace checkpoint_detail

Architecture architecture_of(const ModelConfig& config) {
  Architecture result{canonical(config)};
  result.type = hf_model_type_of(result).value_or("");
  return result;
}

std::vector<std::string> hf_model_types() {
  std::vector<std::string> list;
  for (const ModelSpec& row : families()) list.push_back(row.name);
  return list;
}

std::string hf_misfit(const ModelConfig& model, const std::string& type) {
  if (const ModelSpec* row = find_spec(type)) return misfit_of(model, *row);
  if (!type.empty()) return "no such type is known";
  std::string all;
  for (const ModelSpec& row : families())
    all += detail::concat(all.empty() ? "" : "; ", "not ", row.name, " (", misfit_of(model, row), ")");
  return all;
}

std::optional<std::string> hf_model_type_of(const Architecture& config) {
  if (hf_misfit(config.model, config.type).empty()) return config.type;
  for (const ModelSpec& row : families()) {
    if (misfit_of(config.model, row).empty()) return row.name;
  }
  return std::nullopt;
}

std::string make_hf_config(const Architecture& config, const std::string& base, DType dtype) {
  const ModelConfig& model = config.model;
  Json out = base.empty() ? Json::object() : parse_json(base, "config.json");
  const std::string misfit = hf_misfit(model, config.type);
  TESSERA_ENSURE(ConfigError, misfit.empty(), "this model has no Hugging Face form",
                 config.type.empty() ? "" : " as a " + config.type, ": ", misfit);
  const ModelSpec& row = *find_spec(config.type);
  if (!out.contains("architectures") || row.heads_by_architecture)
    out["architectures"] = {row.architectures[head_of(model, row)]};
  if (model.num_labels) write_classes(*model.num_labels, out);
  out["model_type"] = config.type;
  if (model.padding_id) out["pad_token_id"] = *model.padding_id;
  if (!model.padding_id && row.absent_padding) out["pad_token_id"] = nullptr;
  if (out.contains("dtype")) out["dtype"] = name_of(dtype);
  if (!out.contains("dtype") || out.contains("torch_dtype")) out["torch_dtype"] = name_of(dtype);
  for (const HfKey& key : row.keys) write_key(model, key, out);
  for (const auto& [key, value] : row.constants) out[key] = value;
  write_activation(model, row.activations, out);
  if (model.encoder_layers) out["num_decoder_layers"] = model.num_layers - *model.encoder_layers;
  if (model.scaled_head) write_scaled_head(*model.scaled_head, out);
  if (model.position_embedding != PositionKind::rotary) return to_text(out, 2) + "\n";
  write_window(model, row.window, out);
  write_rope(model, row.rope, out);
  return to_text(out, 2) + "\n";
}

}  // namespace tessera
