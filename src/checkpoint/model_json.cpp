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
  explicit FieldWriter(const ModelConfig& model)
      : rotary_(model.position_embedding == PositionKind::rotary) {}
  Json out = Json::object();

  template <typename T>
  void field(const char* name, const T& value, const char*, const Limits& = {}) {
    if (is_of_training(name) || (std::string_view(name).starts_with("rope_") && !rotary_)) return;
    put(name, value);
  }
  void group(const char* name, const RopeScaling& scaling, const char*) {
    if (!rotary_) return;
    Json& place = out[name] = nullptr;
    if (scaling == RopeScaling{}) return;
    place = {{"type", is_linear(scaling) ? "linear" : "llama3"}, {"factor", scaling.factor}};
    if (is_linear(scaling)) return;
    place["low_freq_factor"] = scaling.low_freq_factor;
    place["high_freq_factor"] = scaling.high_freq_factor;
    place["original_max_positions"] = scaling.original_max_positions;
  }

 private:
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

  bool rotary_;
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
    in->only({"type", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"});
    const std::string& type = (*in)["type"].text();
    if (type != "linear" && type != "llama3") (*in)["type"].fail("must be linear or llama3");
    scaling = linear_scaling((*in)["factor"].number());
    if (type == "linear") return;
    scaling.low_freq_factor = (*in)["low_freq_factor"].number();
    scaling.high_freq_factor = (*in)["high_freq_factor"].number();
    scaling.original_max_positions = (*in)["original_max_positions"].integer(1);
  }

 private:
  /// What not every model has, and what folders of earlier versions lack.
  static bool may_lack(std::string_view name) {
    constexpr std::string_view kNames[] = {"embedding_dropout",  "sliding_window",
                                           "padding_id",         "init_std",
                                           "position_embedding", "norm",
                                           "rope_theta",         "rope_fraction",
                                           "rope_interleaved",   "parallel_residual",
                                           "token_types",        "binary_head",
                                           "num_labels",         "encoder_layers",
                                           "relative_buckets",   "relative_max_distance",
                                           "scaled_head"};
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
  static void read(std::string_view, const JsonView&, std::string&, const Limits&) {}
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
  ModelConfig model = config.model;
  model.proj_bias = model.proj_bias.value_or(*model.linear_bias);
  // Earlier versions do not know the key: it is written where it is not the family's.
  if (model.parallel_residual == spec_of(model.family).model.parallel_residual)
    model.parallel_residual.reset();
  FieldWriter writer(model);
  describe(writer, model);
  writer.out["hf_model_type"] = config.type.empty() ? Json(nullptr) : Json(config.type);
  return to_text(writer.out, 2);
}

Architecture parse_model_json(const std::string& text, const std::string& origin) {
  const Json document = parse_json(text, origin);
  const JsonView in(document, origin);
  Architecture config;
  KeyLister known;
  describe(known, config.model);
  in.only(known.keys);
  FieldReader reader(in);
  describe(reader, config.model);
  config.model = canonical(std::move(config.model));
  if (config.model.position_embedding == PositionKind::rotary) (void)in["rope_theta"].number();
  const auto type = in.find("hf_model_type");
  if (type && !find_spec(type->text())) type->fail("\"" + type->text() + "\" is not known");
  if (type) config.type = type->text();
  return config;
}

}  // namespace tessera
