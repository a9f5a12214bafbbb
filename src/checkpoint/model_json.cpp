#include <algorithm>

#include "base/config_names.hpp"
#include "base/config_schema.hpp"
#include "checkpoint/hf_rules.hpp"
#include "checkpoint/json_strict.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

/// What says nothing about the architecture.
bool is_of_training(std::string_view key) { return key == "init_from" || key == "reinitialize"; }

/// Visitor: the keys that there may be.
struct KeyLister {
  std::vector<std::string_view> keys = {"hf_model_type"};

  template <typename T>
  void field(const char* name, const T&, const char*, const Limits& = {}) {
    if (!is_of_training(name)) keys.push_back(name);
  }
  void group(const char* name, const RopeScaling&, const char*) { keys.push_back(name); }
};

/// Visitor of the section `model`: its fields as members of a JSON object.
class FieldWriter {
 public:
  explicit FieldWriter(const ModelSettings& model)
      : rotary_(model.position_embedding == PositionKind::rotary), mixed_(model.num_experts.has_value()) {}
  Json out = Json::object();

  template <typename T>
  void field(const char* name, const T& value, const char*, const Limits& = {}) {
    const std::string_view key = name;
    if (is_of_training(key) || (key.starts_with("rope_") && !rotary_)) return;
    if (key.starts_with("router_") && !mixed_) return;
    put(name, value);
  }
  void group(const char* name, const RopeScaling& scaling, const char*) {
    if (!rotary_) return;
    Json& place = out[name] = nullptr;
    if (scaling == RopeScaling{}) return;
    place = {{"type", name_of(scaling.type)}, {"factor", scaling.factor}};
    for (const RopeField& each : rope_fields(scaling.type))
      std::visit([&](auto member) { write(place, each.key, scaling.*member); }, each.member);
    if (has_original(scaling.type)) place["original_max_positions"] = scaling.original_max_positions;
  }

 private:
  template <typename T>
  static void write(Json& place, const char* key, const T& value) {
    place[key] = value;
  }
  static void write(Json& place, const char* key, const std::optional<double>& value) {
    if (value) place[key] = *value;
  }
  template <typename T>
  void put(const char* name, const T& value) {
    if constexpr (IsChoice<T>) {
      out[name] = name_of(value);
    } else {
      out[name] = value;
    }
  }
  template <typename T>
  void put(const char* name, const std::optional<T>& value) {
    if (value) put(name, *value);
  }

  bool rotary_, mixed_;
};

/// The way back.
class FieldReader {
 public:
  explicit FieldReader(const JsonView& in) : in_(in) {}

  template <typename T>
  void field(const char* name, T& value, const char*, const Limits& limits = {}) {
    if (is_of_training(name)) return;
    if (!may_lack(name)) return read(name, in_[name], value, limits);
    if (const auto found = in_.find(name)) read(name, *found, value, limits);
  }
  void group(const char* name, RopeScaling& scaling, const char*) {
    const auto in = in_.find(name);
    if (!in) return;
    read("type", (*in)["type"], scaling.type, {});
    scaling.factor = (*in)["factor"].number();
    std::vector<std::string_view> keys = {"type", "factor"};
    for (const RopeField& each : rope_fields(scaling.type)) {
      keys.emplace_back(each.key);
      const auto found = in->find(each.key);
      if (!found && each.required) (void)(*in)[each.key];
      if (found) std::visit([&](auto member) { read("", *found, scaling.*member, {}); }, each.member);
    }
    if (has_original(scaling.type)) {
      keys.emplace_back("original_max_positions");
      scaling.original_max_positions = (*in)["original_max_positions"].integer(1);
    }
    in->only(keys);
  }

 private:
  /// What not every model has, and what folders of earlier versions lack.
  static bool may_lack(std::string_view name) {
    constexpr std::string_view kNames[] = {"embedding_dropout", "sliding_window",        "padding_id",
                                           "init_std",          "position_embedding",    "norm",
                                           "rope_theta",        "rope_fraction",         "rope_interleaved",
                                           "parallel_residual", "token_types",           "binary_head",
                                           "num_labels",        "problem_type",          "window_pattern",
                                           "qk_norm",           "norm_placement",        "shared_norm",
                                           "norm_bias",         "embedding_norm",        "norm_zero_centered",
                                           "embedding_scaled",  "attention_scale",       "attention_softcap",
                                           "logit_softcap",     "rope_local_theta",      "encoder_layers",
                                           "relative_buckets",  "relative_max_distance", "scaled_head"};
    if (name == "num_experts" || name.starts_with("router_") || name.starts_with("moe_")) return true;
    return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
  }

  static void read(std::string_view name, const JsonView& in, std::int64_t& value, const Limits&) {
    value = in.integer(1, name == "num_layers" ? kMaxLayers : kMaxSize);
  }
  static void read(std::string_view name, const JsonView& in, double& value, const Limits&) {
    value = in.number();
    if (name == "rope_fraction" && (value <= 0 || value > 1)) in.fail("must be above 0 and at most 1");
  }
  static void read(std::string_view, const JsonView& in, bool& value, const Limits&) { value = in.boolean(); }
  static void read(std::string_view, const JsonView& in, std::string& value, const Limits&) {
    value = in.text();
  }
  static void read(std::string_view, const JsonView& in, std::vector<double>& value, const Limits&) {
    value.clear();
    for (std::size_t i = 0; i < in.size(); ++i) value.push_back(in[i].number());
  }
  template <IsChoice T>
  static void read(std::string_view, const JsonView& in, T& value, const Limits&) {
    for (const EnumName<T>& each : names_of(T{}).values) {
      if (in.text() == each.name) return void(value = each.value);
    }
    in.fail("\"" + in.text() + "\" is not known");
  }
  template <typename T>
  static void read(std::string_view name, const JsonView& in, std::optional<T>& value, const Limits& limits) {
    if constexpr (std::is_same_v<T, std::int64_t>) {
      value = in.integer(static_cast<std::int64_t>(limits.min));
    } else {
      read(name, in, value.emplace(), limits);
    }
  }

  const JsonView& in_;
};

}  // namespace

std::string to_model_json(const Architecture& config) {
  ModelSettings model = config.model;
  model.proj_bias = model.proj_bias.value_or(*model.linear_bias);
  // Earlier versions do not know these keys: each is written where it is not the family's.
  const ModelSettings usual = ModelConfig(ModelSettings{.family = model.family, .norm = model.norm});
  const auto leave_out = [&](auto... field) {
    ((void)(model.*field == usual.*field ? model.*field = std::nullopt : model.*field), ...);
  };
  using M = ModelSettings;
  leave_out(&M::parallel_residual, &M::qk_norm, &M::norm_placement, &M::shared_norm, &M::norm_zero_centered,
            &M::embedding_norm, &M::embedding_scaled, &M::attention_softcap, &M::logit_softcap);
  FieldWriter writer(model);
  describe(writer, model);
  writer.out["hf_model_type"] = config.type.empty() ? Json(nullptr) : Json(config.type);
  return to_text(writer.out, 2);
}

Architecture parse_model_json(const std::string& text, const std::string& origin) {
  const Json document = parse_json(text, origin);
  const JsonView in(document, origin);
  ModelSettings model;
  KeyLister known;
  describe(known, model);
  in.only(known.keys);
  FieldReader reader(in);
  describe(reader, model);
  Architecture config{canonical(model)};
  if (config.model.position_embedding == PositionKind::rotary) (void)in["rope_theta"].number();
  const auto type = in.find("hf_model_type");
  if (type && !find_spec(type->text())) type->fail("\"" + type->text() + "\" is not known");
  if (type) config.type = type->text();
  return config;
}

}  // namespace tessera
