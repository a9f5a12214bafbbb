#include <algorithm>
#include <cmath>

#include "base/config_names.hpp"
#include "checkpoint/hf_keys.hpp"
#include "checkpoint/hf_read.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace checkpoint_detail {

double positive(const JsonView& in, const char* key, double absent, double most) {
  const auto found = in.find(key);
  const double value = found ? found->number() : absent;
  if (value <= 0 || value > most)
    in[key].fail(detail::concat("must be above 0 and at most ", most), Reader::kWay);
  return value;
}

Json flattened(Json document, const char* nested) {
  if (!nested || !document.is_object() || !document.contains(nested) || !document[nested].is_object())
    return document;
  const Json inner = std::move(document[nested]);
  document.erase(nested);
  for (const auto& [key, value] : inner.items()) document[detail::concat(nested, ".", key)] = value;
  return document;
}

Json nested_again(Json document, const char* nested) {
  if (!nested) return document;
  Json result = Json::object();
  const std::string begin = detail::concat(nested, ".");
  for (const auto& [key, value] : document.items()) {
    if (key.starts_with(begin)) {
      result[nested][key.substr(begin.size())] = value;
    } else {
      result[key] = value;
    }
  }
  return result;
}

}  // namespace checkpoint_detail

namespace {

std::int64_t size_of_default(const ModelSettings& model, const HfDefault& from) {
  auto value = static_cast<std::int64_t>(from.value);
  if (from.times) value *= model.*from.times;
  if (from.over) value /= model.*from.over;
  return value;
}

void read_size(const Reader& in, const HfKey& key) {
  if (const auto* field = std::get_if<std::optional<std::int64_t> ModelSettings::*>(&key.field)) {
    const char* name = key.alias && in.is_absent(key.key) && !in.is_absent(key.alias) ? key.alias : key.key;
    in.model.** field = in.size(name, size_of_default(in.model, key.absent));
    return;
  }
  auto& value = in.model.*std::get<std::int64_t ModelSettings::*>(key.field);
  const bool layers = std::get<std::int64_t ModelSettings::*>(key.field) == &ModelSettings::num_layers;
  auto found = in.root.find(key.key);
  if (!found && key.alias) found = in.root.find(key.alias);
  if (found) {
    value = found->integer(1, layers ? kMaxLayers : kMaxSize);
  } else {
    value = size_of_default(in.model, key.null && !in.is_absent(key.key) ? *key.null : key.absent);
  }
}

void read_key(const Reader& in, const HfKey& key) {
  const auto set = [&]<typename V>(V value) {
    std::visit(
        [&](auto field) {
          using F = std::decay_t<decltype(in.model.*field)>;
          if constexpr (std::is_same_v<F, V> || std::is_same_v<F, std::optional<V>>) in.model.*field = value;
        },
        key.field);
  };
  switch (key.kind) {
    case HfKey::Kind::size:
      return read_size(in, key);
    case HfKey::Kind::positive:
      return set(positive(in.root, key.key, key.absent.value, key.most));
    case HfKey::Kind::cap:  // absent is not null: null says that there is none
      return set(in.is_absent(key.key)   ? key.absent.value
                 : in.root.find(key.key) ? positive(in.root, key.key, 1.0, 1e30)
                                         : 0.0);
    case HfKey::Kind::root:
      return set(1.0 / std::sqrt(positive(in.root, key.key, key.absent.value, 1e30)));
    case HfKey::Kind::flag:
      return set(in.flag(key.key, key.absent.value != 0.0));
    case HfKey::Kind::probability:
      break;
  }
  const double value = in.number(key.key, key.absent.value);
  if (value < 0 || value >= 1) in.root[key.key].fail("must be at least 0 and below 1", Reader::kWay);
  set(value);
}

void read_activation(const Reader& in) {
  const HfActivations& known = in.spec.activations;
  in.model.activation = known.absent;
  const auto found = in.root.find(known.key);
  if (!found) return;
  const auto it = std::find_if(known.names.begin(), known.names.end(),
                               [&](const auto& each) { return found->text() == each.name; });
  if (it == known.names.end())
    found->fail("\"" + found->text() + "\" is not supported; " + known.supported, known.remedy);
  in.model.activation = it->value;
}

// Padding, sizes.

/// torch.nn.Embedding's padding_idx, which counts from the end if it is negative.
void read_padding(const Reader& in) {
  const auto found = in.root.find("pad_token_id");
  if (in.spec.padding_row && in.is_absent("pad_token_id")) in.model.padding_id = in.spec.absent_padding;
  if (!found || !in.spec.padding_row) return;
  const std::int64_t vocabulary = in.model.vocab_size, id = found->integer(-vocabulary, kMaxSize);
  if (id >= vocabulary)
    found->fail(detail::concat(id, " is not below vocab_size ", vocabulary),
                "Transformers cannot make this model's embedding either: correct the id, or remove it.");
  in.model.padding_id = id < 0 ? id + vocabulary : id;
}

/// The name in config.json of a field; null if it has none there.
const char* key_of(const ModelSpec& spec, std::int64_t ModelSettings::*field) {
  for (const HfKey& key : spec.keys) {
    if (key.field == HfKey::Field(field)) return key.key;
  }
  return nullptr;
}

void check_multiple(const Reader& in, std::int64_t ModelSettings::*whole, std::int64_t ModelSettings::*part) {
  if (in.model.*whole % in.model.*part == 0) return;
  const auto told = [&](std::int64_t ModelSettings::*field) {
    const char* key = key_of(in.spec, field);
    return detail::concat(key, " ", in.model.*field,
                          in.is_absent(key) ? " (Transformers' default, as the key is absent)" : "");
  };
  in.root.fail(told(whole) + " is not a multiple of " + told(part), Reader::kWay);
}

void check_sizes(const Reader& in) {
  using M = ModelSettings;
  if (key_of(in.spec, &M::num_kv_heads)) check_multiple(in, &M::num_heads, &M::num_kv_heads);
  const char* head_dim = key_of(in.spec, &M::head_dim);
  if (!head_dim || !in.root.find(head_dim)) check_multiple(in, &M::hidden_size, &M::num_heads);
  if (in.model.position_embedding != PositionKind::rotary) return;
  if (in.model.head_dim % 2 != 0)
    in.root.fail(detail::concat("rotary heads must have even width, not ", in.model.head_dim), Reader::kWay);
}

// What is refused.

std::string listed(const std::vector<std::string>& names) {
  std::string text = names.front();
  for (std::size_t i = 1; i < names.size(); ++i) text += (i + 1 < names.size() ? ", " : " and ") + names[i];
  return text;
}

const ModelSpec& row_of(const JsonView& root) {
  const std::string& type = root["model_type"].text();
  const ModelSpec* spec = find_spec(type);
  if (!spec || spec->architectures.empty())
    root["model_type"].fail("\"" + type + "\" is not supported; " + listed(hf_model_types()) + " are",
                            "Use a model of one of these types.");
  const auto& known = spec->architectures;
  const auto list = root.find("architectures");
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    const std::string& name = (*list)[i].text();
    if (std::find(known.begin(), known.end(), name) == known.end())
      (*list)[i].fail("\"" + name + "\" is not supported; " + listed({known.begin(), known.end()}) + " are",
                      "Use the language model itself, without other heads.");
  }
  return *spec;
}

/// How many classes of samples there are: Transformers keeps their names.
std::int64_t read_classes(const Reader& in) {
  const auto names = in.root.find("id2label");
  const auto count = in.root.find("num_labels");
  const std::int64_t classes = names   ? static_cast<std::int64_t>(names->object().size())
                               : count ? count->integer(1, kMaxSize)
                                       : 2;
  if (classes < 1) names->fail("has no label", "Name each class, or remove the key.");
  return classes;
}

std::optional<ProblemType> read_problem(const Reader& in) {
  const auto problem = in.root.find("problem_type");
  if (!problem) return std::nullopt;
  for (const EnumName<ProblemType>& each : names_of(ProblemType{}).values) {
    if (problem->text() == each.name) return each.value;
  }
  problem->fail("\"" + problem->text() + "\" is not known",
                "regression, single_label_classification and multi_label_classification are.");
}

/// What the architecture says of the model's heads; without one it has all of them.
void read_heads(const Reader& in) {
  if (!in.spec.heads_by_architecture) return;
  const auto list = in.root.find("architectures");
  const std::string name = list && list->size() > 0 ? (*list)[0].text() : in.spec.architectures[0];
  in.model.binary_head = name == in.spec.architectures[0];
  if (name != in.spec.architectures[2]) return;
  in.model.num_labels = read_classes(in);
  in.model.problem_type = read_problem(in);
  const auto dropout = in.root.find("classifier_dropout");
  if (dropout && dropout->number() != in.model.dropout)
    dropout->fail(detail::concat("is not the model's hidden_dropout_prob ", in.model.dropout),
                  "Tessera has one probability for both: make them equal, or take this one out.");
}

/// Of an encoder with a decoder: which has how many layers, by keys that such models have in common.
void read_layers(const Reader& in) {
  if (!spec_of(in.spec.family).encoder_decoder) return;
  const std::int64_t encoder = *in.model.encoder_layers;
  const auto found = in.root.find("num_decoder_layers");
  const std::int64_t decoder = found ? found->integer(1, kMaxLayers) : encoder;
  if (encoder > kMaxLayers)
    in.root["num_layers"].fail(detail::concat("must be at most ", kMaxLayers), Reader::kWay);
  in.model.num_layers = encoder + decoder;
}

/// T5's head is scaled unless config.json says that it is not tied (version 1.1), or Transformers 5 has noted
/// that down under a name of its own, and ties heads of either kind. Whether it is tied is up to the weights
/// where it is not scaled and there are weights.
void read_scaled_head(const Reader& in) {
  if (!in.spec.model.scaled_head) return;
  const bool tied = in.flag("tie_word_embeddings", true);
  in.model.scaled_head = *in.spec.model.scaled_head && in.flag("scale_decoder_outputs", tied);
  in.model.tied_head = *in.model.scaled_head || (in.root.find("scale_decoder_outputs") && tied);
}

/// Falcon 40B's new decoder has a norm for each branch or one for both, and any number of key and value
/// heads; the older ones have one norm, and one key and value head or as many as heads.
void read_falcon(const Reader& in) {
  if (!in.spec.falcon_layers) return;
  ModelSettings& model = in.model;
  const bool is_new = in.flag("new_decoder_architecture", false);
  const bool parallel = in.flag("parallel_attn", true);
  if (is_new && !parallel)
    in.root["parallel_attn"].fail("must be true or absent with new_decoder_architecture", Reader::kWay);
  const std::int64_t norms = in.size("num_ln_in_parallel_attn", is_new ? 2 : 1);
  if (parallel && norms > (is_new ? 2 : 1))
    in.root["num_ln_in_parallel_attn"].fail(
        detail::concat("must be ", is_new ? "1 or 2" : "1 without new_decoder_architecture"), Reader::kWay);
  model.parallel_residual = parallel;
  model.shared_norm = parallel && norms == 1;
  const std::int64_t given = in.size("num_kv_heads", model.num_heads);
  if (!is_new && !in.flag("multi_query", true) && given != model.num_heads)
    in.root["num_kv_heads"].fail("must be as many as num_attention_heads without new_decoder_architecture",
                                 Reader::kWay);
  model.num_kv_heads = is_new ? given : in.flag("multi_query", true) ? 1 : model.num_heads;
  if (model.num_heads % model.num_kv_heads != 0)
    in.root["num_kv_heads"].fail("does not divide num_attention_heads", Reader::kWay);
}

/// Qwen's: every so manieth layer has experts, but for those listed.
void read_sparse_layers(const Reader& in) {
  if (!in.spec.sparse_layers) return;
  const std::int64_t step = in.size("decoder_sparse_step", 1);
  std::vector<bool> mixed;
  for (std::int64_t i = 0; i < in.model.num_layers; ++i) mixed.push_back((i + 1) % step == 0);
  const auto dense = in.root.find("mlp_only_layers");
  for (std::size_t i = 0; dense && i < dense->size(); ++i)
    mixed[static_cast<std::size_t>((*dense)[i].integer(0, in.model.num_layers - 1))] = false;
  if (std::ranges::find(mixed, true) == mixed.end())
    in.root.fail("no layer has experts, by decoder_sparse_step and mlp_only_layers", Reader::kWay);
  set_expert_layers(in.model, mixed);
}

/// What Transformers derives from the activation and writes down must not say something else.
void check_gate(const Reader& in) {
  const auto gated = in.root.find("is_gated_act");
  if (gated && gated->boolean() != is_gated(*in.model.activation))
    gated->fail(detail::concat("does not fit ", in.spec.activations.key), Reader::kWay);
}

/// Reads what a row says, in its order: defaults may follow from what was read before.
ModelConfig read_model(const JsonView& root, const ModelSpec& spec) {
  ModelSettings model = spec.model;
  model.family = spec.family;
  const Reader in{root, spec, model};
  for (const HfKey& key : spec.keys) read_key(in, key);
  read_activation(in);
  check_gate(in);
  read_layers(in);
  read_falcon(in);
  read_sparse_layers(in);
  read_scaled_head(in);
  check_sizes(in);
  read_window(in);
  read_padding(in);
  read_heads(in);
  if (model.position_embedding == PositionKind::rotary) read_rope(in);
  return canonical(model);
}

Architecture read_config(const std::string& text, const std::string& origin) {
  const Json whole = parse_json(text, origin, kHfFileRemedy);
  const ModelSpec& spec = row_of(JsonView(whole, origin, kHfFileRemedy));
  const Json document = flattened(whole, spec.nested);
  const JsonView root(document, origin, kHfFileRemedy);
  refuse_what_is_not_had(root, spec);
  return {read_model(root, spec), spec.name};
}

}  // namespace

Architecture parse_architecture(const std::string& text, const std::string& origin) {
  const Json document = parse_json(text, origin, kHfFileRemedy);
  return document.contains("hf_model_type") ? parse_model_json(text, origin) : parse_hf_config(text, origin);
}

Architecture parse_hf_config(const std::string& text, const std::string& origin) {
  try {
    return read_config(text, origin);
  } catch (const CheckpointError& error) {  // of the reader that checkpoints have in common with it
    throw ConfigError(error.what());
  }
}

}  // namespace tessera
