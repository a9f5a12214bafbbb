#include <algorithm>
#include <cmath>

#include "checkpoint/hf_read.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

/// Of models with experts.
const char* unlike_in_experts(const ModelConfig& c, const ModelSpec& type) {
  using M = ModelSettings;
  const bool mixed = type.reads(&M::num_experts);
  if (c.num_experts.has_value() != mixed)
    return mixed ? "its layers have experts" : "its layers have no experts";
  if (!mixed) return nullptr;
  if (c.moe_layers && !type.sparse_layers) return "all its layers have experts";
  if (c.moe_ffn_hidden_size && !type.reads(&M::moe_ffn_hidden_size))
    return "its experts are as wide as ffn_hidden_size";
  if (!c.router_normalized.value_or(true) && !type.reads(&M::router_normalized))
    return "the weights of a token's experts add up to 1";
  return nullptr;
}

/// Of what few types have.
const char* unlike_in_detail(const ModelConfig& c, const ModelConfig& own, const ModelSpec& type) {
  using M = ModelSettings;
  const auto reads = [&](auto M::*field) { return type.reads(field); };
  if (c.norm_placement != own.norm_placement || (c.shared_norm != own.shared_norm && !type.falcon_layers))
    return "its norms stand elsewhere";
  if (c.norm_zero_centered != own.norm_zero_centered) return "its norms multiply by other weights";
  if (has_norm_bias(c) != has_norm_bias(own)) return "its norms have other biases";
  if (c.qk_norm != own.qk_norm) return "its queries and keys are normed otherwise";
  if (c.embedding_norm != own.embedding_norm || c.embedding_scaled != own.embedding_scaled)
    return "its embedding is normed or scaled otherwise";
  if (!reads(&M::attention_softcap) && c.attention_softcap != own.attention_softcap)
    return "it caps no scores";
  if (!reads(&M::logit_softcap) && c.logit_softcap != own.logit_softcap) return "it caps no logits";
  if (!reads(&M::attention_scale) && c.attention_scale) return "its scores have another scale";
  if (c.position_embedding == PositionKind::rotary &&
      c.rope_local_theta.has_value() != own.rope_local_theta.has_value())
    return "its layers with a window rotate otherwise";
  if (type.window.use == HfWindow::Use::never && c.sliding_window) return "it has no window";
  if (type.window.use == HfWindow::Use::always && c.window_pattern) return "all its layers have the window";
  return unlike_in_experts(c, type);
}

std::string misfit_of(const ModelConfig& c, const ModelSpec& type) {
  if (type.architectures.empty()) return "Transformers has no such type";
  ModelSettings usual = type.model;
  usual.family = type.family;
  const ModelConfig own = usual;
  if (std::string_view(spec_of(c.family).body) != spec_of(type.family).body) return "its layers are others";
  if (c.position_embedding != own.position_embedding)
    return detail::concat("its positions are ", name_of(own.position_embedding), ", not ",
                          name_of(c.position_embedding));
  if (c.norm != own.norm) return detail::concat("its norm is ", name_of(own.norm), ", not ", name_of(c.norm));
  const auto& listed = type.activations.names;
  const bool known =
      std::any_of(listed.begin(), listed.end(), [&](const auto& each) { return each.value == c.activation; });
  // Types without a gate take any activation of that kind.
  const bool other = is_gated(c.activation) ? c.activation != own.activation : is_gated(own.activation);
  if (other && !known)
    return detail::concat("its MLP has ", is_gated(own.activation) ? name_of(own.activation) : "no gate",
                          ", not ", name_of(c.activation));
  if (c.parallel_residual && !own.parallel_residual) return "its attention and MLP follow one another";
  if (c.position_embedding == PositionKind::rotary &&
      (c.rope_interleaved != type.rope.interleaved || (c.rope_fraction != 1.0 && !type.rope.partial)))
    return detail::concat("it rotates pairs ", type.rope.interleaved ? "(2i, 2i+1)" : "(i, i + d/2)",
                          type.rope.partial ? "" : " over the whole head");
  if (const char* unlike = unlike_in_detail(c, own, type)) return unlike;
  for (const HfNeed& need : type.needs) {
    if (!need.holds(c)) return need.reason;
  }
  return "";
}

/// Of a scale its inverse square, which is a whole number in Transformers.
Json root_of(const ModelSettings& model) {
  const double scale = model.attention_scale.value_or(1.0 / std::sqrt(static_cast<double>(model.head_dim)));
  const double value = 1.0 / (scale * scale), whole = std::round(value);
  return std::abs(value - whole) < 1e-9 * whole ? Json(static_cast<std::int64_t>(whole)) : Json(value);
}

/// The way back of read_falcon. One that says new_decoder_architecture goes on saying it where it can.
void write_falcon(const ModelConfig& model, Json& out) {
  const bool parallel = model.parallel_residual, two_norms = parallel && !model.shared_norm;
  const bool few_heads = model.num_kv_heads == 1 || model.num_kv_heads == model.num_heads;
  const bool is_new = parallel && (two_norms || !few_heads || out.value("new_decoder_architecture", false));
  out["parallel_attn"] = parallel;
  out["new_decoder_architecture"] = is_new;
  out["multi_query"] = model.num_kv_heads == 1;
  out["num_kv_heads"] = model.num_kv_heads;
  out["num_ln_in_parallel_attn"] = two_norms ? Json(2) : is_new ? Json(1) : Json(nullptr);
}

void write_key(const ModelSettings& model, const HfKey& key, Json& out) {
  if (key.kind == HfKey::Kind::root) return void(out[key.key] = root_of(model));
  if (key.kind == HfKey::Kind::cap) {
    const double cap = (model.*std::get<std::optional<double> ModelSettings::*>(key.field)).value_or(0.0);
    return void(out[key.key] = cap == 0.0 ? Json(nullptr) : Json(cap));
  }
  // Not by both of its names, which would be two values.
  const bool by_alias =
      key.field == HfKey::Field(&ModelSettings::num_experts) && key.alias && out.contains(key.alias);
  const auto write = [&]<typename T>(const T& value) { out[by_alias ? key.alias : key.key] = value; };
  // Transformers 5 takes a whole number alone for MPT's.
  if (key.kind == HfKey::Kind::probability && key.whole_zero &&
      model.*std::get<double ModelSettings::*>(key.field) == 0.0)
    return void(out[key.key] = 0);
  std::visit(
      [&](auto field) {
        const auto& value = model.*field;
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::optional<double>>) {
          write(value.value_or(model.dropout));  // that of embeddings
        } else if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::optional<std::int64_t>>) {
          const bool width = key.field == HfKey::Field(&ModelSettings::moe_ffn_hidden_size);
          write(value.value_or(width ? model.ffn_hidden_size : 0));
        } else if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::optional<bool>>) {
          const bool router = key.field == HfKey::Field(&ModelSettings::router_normalized);
          write(value.value_or(router || *model.linear_bias));  // that of the projection
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

/// Layers without experts are named one by one.
void write_sparse_layers(const ModelConfig& model, Json& out) {
  out["decoder_sparse_step"] = 1;
  out["mlp_only_layers"] = Json::array();
  for (std::int64_t i = 0; i < model.num_layers; ++i) {
    if (experts_of(model, i) == 0) out["mlp_only_layers"].push_back(i);
  }
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

}  // namespace

namespace checkpoint_detail {

ModelConfig canonical(ModelConfig model) {
  model.init_from.reset();
  model.reinitialize = false;
  if (model.proj_bias == model.linear_bias) model.proj_bias.reset();
  if (model.embedding_dropout == model.dropout) model.embedding_dropout.reset();
  if (model.norm_bias == (model.norm == NormStyle::layernorm)) model.norm_bias.reset();
  model.rope_scaling = canonical(model.rope_scaling);
  std::vector<bool> slides;
  for (std::int64_t i = 0; i < model.num_layers; ++i) slides.push_back(window_of(model, i) > 0);
  set_windows(model, model.sliding_window.value_or(0), slides);
  std::vector<bool> mixed;
  for (std::int64_t i = 0; i < model.num_layers; ++i) mixed.push_back(experts_of(model, i) > 0);
  if (model.num_experts) set_expert_layers(model, mixed);
  if (model.moe_ffn_hidden_size == model.ffn_hidden_size) model.moe_ffn_hidden_size.reset();
  if (model.router_normalized.value_or(false)) model.router_normalized.reset();
  model.router_aux_loss = model.router_z_loss = 0.0;
  if (model.attention_scale == 1.0 / std::sqrt(static_cast<double>(model.head_dim)))
    model.attention_scale.reset();
  if (model.position_embedding != PositionKind::rotary) {
    const ModelSettings none;
    model.rope_theta = none.rope_theta;
    model.rope_fraction = none.rope_fraction;
    model.rope_interleaved = none.rope_interleaved;
    model.rope_scaling = none.rope_scaling;
    model.rope_local_theta = none.rope_local_theta;
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
  for (const ModelSpec& row : families()) {
    if (!row.architectures.empty()) list.push_back(row.name);
  }
  return list;
}

std::string hf_misfit(const ModelConfig& model, const std::string& type) {
  if (const ModelSpec* row = find_spec(type)) return misfit_of(model, *row);
  if (!type.empty()) return "no such type is known";
  std::string all;
  for (const ModelSpec& row : families()) {
    if (row.architectures.empty()) continue;
    all += detail::concat(all.empty() ? "" : "; ", "not ", row.name, " (", misfit_of(model, row), ")");
  }
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
  const std::string misfit = hf_misfit(model, config.type);
  TESSERA_ENSURE(ConfigError, misfit.empty(), "this model has no Hugging Face form",
                 config.type.empty() ? "" : " as a " + config.type, ": ", misfit);
  const ModelSpec& row = *find_spec(config.type);
  Json out = base.empty() ? Json::object() : flattened(parse_json(base, "config.json"), row.nested);
  if (!out.contains("architectures") || row.heads_by_architecture)
    out["architectures"] = {row.architectures[head_of(model, row)]};
  if (model.num_labels) write_classes(*model.num_labels, out);
  if (model.problem_type) out["problem_type"] = name_of(*model.problem_type);
  out["model_type"] = config.type;
  if (model.padding_id) out["pad_token_id"] = *model.padding_id;
  if (!model.padding_id && row.absent_padding) out["pad_token_id"] = nullptr;
  if (out.contains("dtype")) out["dtype"] = name_of(dtype);
  if (!out.contains("dtype") || out.contains("torch_dtype")) out["torch_dtype"] = name_of(dtype);
  const ModelSettings fields = model;
  for (const HfKey& key : row.keys) write_key(fields, key, out);
  for (const auto& [key, value] : row.constants) out[key] = value;
  write_activation(model, row.activations, out);
  if (model.encoder_layers) out["num_decoder_layers"] = model.num_layers - *model.encoder_layers;
  if (model.scaled_head) write_scaled_head(*model.scaled_head, out);
  if (row.falcon_layers) write_falcon(model, out);
  if (row.sparse_layers) write_sparse_layers(model, out);
  if (model.position_embedding == PositionKind::rotary) {
    write_window(model, row.window, out);
    write_rope(model, row.rope, out);
  }
  return to_text(nested_again(std::move(out), row.nested), 2) + "\n";
}

}  // namespace tessera
