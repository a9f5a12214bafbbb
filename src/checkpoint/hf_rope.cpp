#include <algorithm>
#include <cmath>

#include "base/config_names.hpp"
#include "checkpoint/hf_read.hpp"

namespace tessera::checkpoint_detail {
namespace {

constexpr const char* kOriginal = "original_max_position_embeddings";
constexpr const char* kFull = "full_attention";
constexpr const char* kSliding = "sliding_attention";

void read_fraction(const Reader& in, const JsonView& place, const char* key) {
  const auto found = place.find(key);
  if (!found) return;
  if (!in.spec.rope.partial && found->number() != 1.0)
    found->fail("is not supported; only 1.0 is", "Use a model that rotates all of each head.");
  in.model.rope_fraction = positive(place, key, 1.0, 1.0);
}

/// Nothing for "default".
std::optional<RopeType> type_of(const JsonView& scaling) {
  auto found = scaling.find("rope_type");
  if (!found) found = scaling.find("type");
  if (!found || found->text() == "default") return std::nullopt;
  for (const EnumName<RopeType>& each : names_of(RopeType{}).values) {
    if (found->text() == each.name) return each.value;
  }
  if (found->text() == "su") return RopeType::longrope;  // as the first Phi-3 called it
  found->fail(
      "\"" + found->text() + "\" is not supported; default, linear, dynamic, llama3, yarn and longrope are",
      "Use another model.");
}

void check_keys(const JsonView& scaling, std::optional<RopeType> type) {
  std::vector<std::string_view> known = {"rope_theta", "rope_type", "type",
                                         "factor",     kOriginal,   "partial_rotary_factor"};
  for (const RopeField& each : rope_fields(type.value_or(RopeType::llama3))) known.emplace_back(each.key);
  if (type == RopeType::yarn) known.insert(known.end(), {"mscale", "mscale_all_dim"});
  for (const auto& item : scaling.object().items()) {
    if (std::ranges::find(known, item.key()) == known.end())
      scaling.fail("\"" + item.key() + "\" is not supported" +
                       (type ? detail::concat(" with ", name_of(*type)) : std::string()),
                   Reader::kWay);
  }
}

void read_field(const JsonView& found, double& value) {
  value = found.number();
  if (value <= 0) found.fail("must be above 0", Reader::kWay);
}
void read_field(const JsonView& found, std::optional<double>& value) { read_field(found, value.emplace()); }
void read_field(const JsonView& found, bool& value) { value = found.boolean(); }
void read_field(const JsonView& found, std::vector<double>& values) {
  for (std::size_t i = 0; i < found.size(); ++i) read_field(found[i], values.emplace_back());
}

/// What YaRN multiplies cos and sin by, for a stretch of `factor`.
double yarn_factor(double factor, double scale) {
  return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
}

void check_scaling(const JsonView& scaling, const ModelSettings& model, const RopeScaling& rope) {
  const auto rotated =
      static_cast<std::int64_t>(static_cast<double>(model.head_dim) * model.rope_fraction) / 2 * 2;
  if (rope.factor < 1) scaling["factor"].fail("must be at least 1", Reader::kWay);
  if (rope.type == RopeType::llama3 && rope.high_freq_factor <= rope.low_freq_factor)
    scaling.fail("low_freq_factor must be positive and below high_freq_factor", Reader::kWay);
  if (rope.type == RopeType::yarn && rope.beta_fast <= rope.beta_slow)
    scaling.fail("beta_slow must be below beta_fast", Reader::kWay);
  if (rope.type == RopeType::dynamic && rotated <= 2)
    scaling.fail(detail::concat("dynamic scaling needs more than 2 rotated features, not ", rotated),
                 Reader::kWay);
  if (rope.type != RopeType::longrope) return;
  for (const auto& [key, list] :
       {std::pair("short_factor", &rope.short_factor), std::pair("long_factor", &rope.long_factor)}) {
    if (static_cast<std::int64_t>(list->size()) != rotated / 2)
      scaling[key].fail(detail::concat("has ", list->size(), " numbers; it must have one for each of the ",
                                       rotated / 2, " pairs of rotated features"),
                        Reader::kWay);
  }
}

void read_scaling(const Reader& in, const JsonView& scaling) {
  const std::optional<RopeType> type = type_of(scaling);
  check_keys(scaling, type);
  if (!type) return;
  RopeScaling rope;
  rope.type = *type;
  if (has_original(*type)) {
    const auto inner = scaling.find(kOriginal);
    rope.original_max_positions =
        in.size(kOriginal, inner ? inner->integer(1, kMaxSize) : in.model.max_positions);
  }
  const bool by_lengths = (*type == RopeType::yarn || *type == RopeType::longrope) && !scaling.find("factor");
  rope.factor = by_lengths ? static_cast<double>(in.model.max_positions) /
                                 static_cast<double>(rope.original_max_positions)
                           : scaling["factor"].number();
  for (const RopeField& each : rope_fields(*type)) {
    const auto found = scaling.find(each.key);
    if (!found && each.required) (void)scaling[each.key];
    if (found) std::visit([&](auto member) { read_field(*found, rope.*member); }, each.member);
  }
  const auto scale = scaling.find("mscale"), of_all = scaling.find("mscale_all_dim");
  if (!rope.attention_factor && scale && of_all && scale->number() != 0 && of_all->number() != 0)
    rope.attention_factor =
        yarn_factor(rope.factor, scale->number()) / yarn_factor(rope.factor, of_all->number());
  check_scaling(scaling, in.model, rope);
  in.model.rope_scaling = rope;
}

/// The member of an object, where it is there and not empty.
std::optional<JsonView> filled(const JsonView& in, const char* key) {
  auto found = in.find(key);
  if (found && found->object().empty()) found.reset();
  return found;
}

/// Gemma 3: a rope for layers with a window, and one for the others.
void read_rope_by_layer(const Reader& in) {
  const HfRope& keys = in.spec.rope;
  in.model.rope_local_theta = positive(in.root, keys.local_theta, keys.absent_local_theta, 1e30);
  const auto parameters = filled(in.root, "rope_parameters");
  if (parameters) {
    for (const auto& item : parameters->object().items()) {
      if (item.key() != kFull && item.key() != kSliding)
        parameters->fail(
            "\"" + item.key() + "\" is not a kind of layer; full_attention and sliding_attention are",
            Reader::kWay);
    }
    if (const auto sliding = filled(*parameters, kSliding)) {
      if (type_of(*sliding))
        sliding->fail("stretched positions of layers with a window are not supported", Reader::kWay);
      in.model.rope_local_theta = positive(*sliding, "rope_theta", *in.model.rope_local_theta, 1e30);
    }
    if (const auto full = filled(*parameters, kFull)) {
      in.model.rope_theta = positive(*full, "rope_theta", in.model.rope_theta, 1e30);
      read_scaling(in, *full);
    }
  }
  if (const auto scaling = filled(in.root, "rope_scaling")) read_scaling(in, *scaling);
}

template <typename T>
void write_field(Json& out, const char* key, const T& value) {
  out[key] = value;
}
void write_field(Json& out, const char* key, const std::optional<double>& value) {
  if (value) out[key] = *value;
}

/// Null where positions are not stretched.
Json scaling_of(const RopeScaling& rope) {
  if (!rope.active()) return nullptr;
  Json scaling = {{"rope_type", name_of(rope.type)}, {"factor", rope.factor}};
  for (const RopeField& each : rope_fields(rope.type))
    std::visit([&](auto member) { write_field(scaling, each.key, rope.*member); }, each.member);
  if (has_original(rope.type)) scaling[kOriginal] = rope.original_max_positions;
  return scaling;
}

}  // namespace

std::span<const RopeField> rope_fields(RopeType type) {
  using S = RopeScaling;
  static const RopeField kLlama3[] = {{"low_freq_factor", &S::low_freq_factor, true},
                                      {"high_freq_factor", &S::high_freq_factor, true}};
  static const RopeField kYarn[] = {{"beta_fast", &S::beta_fast},
                                    {"beta_slow", &S::beta_slow},
                                    {"truncate", &S::truncate},
                                    {"attention_factor", &S::attention_factor}};
  static const RopeField kLongrope[] = {{"short_factor", &S::short_factor, true},
                                        {"long_factor", &S::long_factor, true},
                                        {"attention_factor", &S::attention_factor}};
  switch (type) {
    case RopeType::llama3:
      return kLlama3;
    case RopeType::yarn:
      return kYarn;
    case RopeType::longrope:
      return kLongrope;
    case RopeType::linear:
    case RopeType::dynamic:
      break;
  }
  return {};
}

RopeScaling canonical(const RopeScaling& scaling) {
  if (!scaling.active()) return {};
  RopeScaling result;
  result.type = scaling.type;
  result.factor = scaling.factor;
  // Llama-3's rule with every wavelength counted as long, as earlier configurations wrote linear.
  if (scaling == RopeScaling{scaling.factor, 1.0, 4.0, 1}) result.type = RopeType::linear;
  for (const RopeField& each : rope_fields(result.type))
    std::visit([&](auto member) { result.*member = scaling.*member; }, each.member);
  if (has_original(result.type)) result.original_max_positions = scaling.original_max_positions;
  return result;
}

/// As Transformers merges the older spelling, `rope_scaling` beside `rope_theta`, with `rope_parameters`.
void read_rope(const Reader& in) {
  const HfRope& keys = in.spec.rope;
  in.model.rope_theta = positive(in.root, keys.theta, keys.absent_theta, 1e30);
  in.model.rope_fraction = keys.absent_fraction;
  in.model.rope_interleaved = keys.interleaved;
  read_fraction(in, in.root, keys.fraction);
  if (keys.local_theta) return read_rope_by_layer(in);
  auto scaling = filled(in.root, "rope_scaling");
  if (!scaling) scaling = in.root.find("rope_parameters");
  if (!scaling) return;
  in.model.rope_theta = positive(*scaling, "rope_theta", in.model.rope_theta, 1e30);
  read_fraction(in, *scaling, "partial_rotary_factor");
  read_scaling(in, *scaling);
}

void write_rope(const ModelConfig& model, const HfRope& keys, Json& out) {
  Json scaling = scaling_of(model.rope_scaling);
  // Both spellings, so that Transformers 4 and 5 read the same model.
  out[keys.theta] = model.rope_theta;
  out["rope_scaling"] = scaling;
  if (keys.partial) out[keys.fraction] = model.rope_fraction;
  if (scaling.is_null()) scaling = {{"rope_type", "default"}};
  scaling["rope_theta"] = model.rope_theta;
  if (keys.partial) scaling["partial_rotary_factor"] = model.rope_fraction;
  if (keys.local_theta) {
    out[keys.local_theta] = *model.rope_local_theta;
    scaling = {{kFull, scaling},
               {kSliding, {{"rope_type", "default"}, {"rope_theta", *model.rope_local_theta}}}};
  }
  out["rope_parameters"] = scaling;
}

}  // namespace tessera::checkpoint_detail
