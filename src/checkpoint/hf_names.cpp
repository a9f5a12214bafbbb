#include "checkpoint/hf_names.hpp"

#include <algorithm>

namespace tessera {
namespace checkpoint_detail {
namespace {

constexpr const char* kPositions = "embedding.position_embeddings.weight";

bool is_gated(const ModelConfig& model) { return tessera::is_gated(model.activation); }

/// A module's weight [rows, columns], of a norm [rows], and whether it has a bias [rows].
struct Extent {
  std::int64_t rows = 0, columns = 0;
  bool bias = false;
};

Extent extent_of(const ModelConfig& m, std::string_view module) {
  const std::int64_t heads = m.num_heads * m.head_dim, kv = m.num_kv_heads * m.head_dim;
  if (module.ends_with("linear_q")) return {heads, m.hidden_size, m.qkv_bias};
  if (module.ends_with("linear_kv")) return {2 * kv, m.hidden_size, m.qkv_bias};
  if (module.ends_with("relative_attention_bias")) return {*m.relative_buckets, m.num_heads, false};
  if (module.ends_with("linear_qkv")) return {heads + 2 * kv, m.hidden_size, m.qkv_bias};
  if (module.ends_with("linear_proj")) return {m.hidden_size, heads, has_proj_bias(m)};
  const bool expert = module.find(".experts.") != module.npos;
  const std::int64_t width = expert ? expert_width(m) : m.ffn_hidden_size;
  if (module.ends_with("mlp.router")) return {*m.num_experts, m.hidden_size, false};
  if (module.ends_with("linear_fc1")) return {width * (is_gated(m) ? 2 : 1), m.hidden_size, m.linear_bias};
  if (module.ends_with("linear_fc2")) return {m.hidden_size, width, m.linear_bias};
  if (module.ends_with("token_type_embeddings")) return {*m.token_types, m.hidden_size, false};
  if (module == "pooler.dense" || module == "lm_head.dense") return {m.hidden_size, m.hidden_size, true};
  if (module == "binary_head") return {2, m.hidden_size, true};
  if (module == "classifier") return {*m.num_labels, m.hidden_size, true};
  const bool full = m.qk_norm == QkNorm::full;
  if (module.ends_with("q_layernorm")) return {full ? heads : m.head_dim, 0, false};
  if (module.ends_with("k_layernorm")) return {full ? kv : m.head_dim, 0, false};
  return {m.hidden_size, 0, has_norm_bias(m)};
}

std::int64_t rows_of(const ModelConfig& m, HfTensor::Rows rows, std::int64_t all) {
  switch (rows) {
    case HfTensor::Rows::query:
      return m.num_heads * m.head_dim;
    case HfTensor::Rows::key_value:
      return m.num_kv_heads * m.head_dim;
    case HfTensor::Rows::ffn:
      return all / (is_gated(m) ? 2 : 1);
    case HfTensor::Rows::all:
      break;
  }
  return all;
}

/// Adds a module's weight and, where it has one, its bias.
void map_module(const ModelConfig& model, const HfNames& names, const std::string& ours,
                const std::string& begin, const std::vector<HfTensor>& theirs, std::vector<HfMapping>& out) {
  const Extent extent = extent_of(model, ours);
  const bool matrix = extent.columns > 0, turned = matrix && names.transposed;
  HfMapping weight{ours + ".weight", matrix ? Shape{extent.rows, extent.columns} : Shape{extent.rows}, {}};
  HfMapping bias{ours + ".bias", {extent.rows}, {}};
  for (const HfTensor& tensor : theirs) {
    if (is_gated(model) ? tensor.plain : tensor.gate) continue;
    const std::int64_t rows = rows_of(model, tensor.rows, extent.rows);
    const Shape shape = !matrix  ? Shape{rows}
                        : turned ? Shape{extent.columns, rows}
                                 : Shape{rows, extent.columns};
    const bool grouped = tensor.order == HfTensor::Order::grouped;
    const std::int64_t groups = grouped ? model.num_kv_heads : 0, head_dim = grouped ? model.head_dim : 0;
    const std::string name = (tensor.outside ? "" : begin) + tensor.name;
    weight.parts.push_back({name + ".weight", shape, turned, groups, head_dim});
    bias.parts.push_back({name + ".bias", {rows}, false, groups, head_dim});
  }
  out.push_back(std::move(weight));
  if (extent.bias) out.push_back(std::move(bias));
}

/// Adds what stands beside the layers.
void map_beside(const ModelConfig& model, const HfNames& names, const std::string& prefix,
                const std::vector<HfParameter>& list, std::vector<HfMapping>& out) {
  for (const HfParameter& each : list) {
    if (each.only && !each.only(model)) continue;
    if (each.vector == nullptr) {
      map_module(model, names, each.ours, prefix, each.theirs, out);
      continue;
    }
    const Shape shape{model.*each.vector};
    const HfTensor& theirs = each.theirs.front();
    out.push_back({each.ours, shape, {{(theirs.outside ? "" : prefix) + theirs.name, shape}}});
  }
}

/// A name with the number of an expert in place of its *.
std::string numbered(std::string_view name, std::int64_t expert) {
  const std::size_t star = name.find('*');
  return detail::concat(name.substr(0, star), expert, name.substr(star + 1));
}

/// Adds a layer's router and experts as Transformers' modules hold them.
void map_stacked(const ModelConfig& model, const HfNames& names, const std::string& ours,
                 const std::string& begin, std::vector<HfMapping>& out) {
  map_module(model, names, ours + "mlp.router", begin, {{names.experts.module_router}}, out);
  for (std::int64_t i = 0; i < *model.num_experts; ++i) {
    const std::string expert = numbered(ours + "mlp.experts.local_experts.*.", i);
    for (const auto& [linear, theirs] : {std::pair("linear_fc1", names.experts.module_fc1),
                                         std::pair("linear_fc2", names.experts.module_fc2)}) {
      const Extent extent = extent_of(model, expert + linear);
      const HfPart all{
          .name = begin + theirs, .shape = {*model.num_experts, extent.rows, extent.columns}, .member = i};
      out.push_back({expert + linear + ".weight", {extent.rows, extent.columns}, {all}});
    }
  }
}

/// Adds a layer's router and experts.
void map_experts(const ModelConfig& model, const HfNames& names, const std::string& ours,
                 const std::string& begin, std::vector<HfMapping>& out) {
  map_module(model, names, ours + "mlp.router", begin, {{names.experts.router}}, out);
  for (std::int64_t i = 0; i < *model.num_experts; ++i) {
    const std::string expert = numbered(ours + "mlp.experts.local_experts.*.", i);
    std::vector<std::string> texts;  // which the tensors' names refer to
    for (const HfTensor& each : names.experts.fc1) texts.push_back(numbered(each.name, i));
    std::vector<HfTensor> fc1 = names.experts.fc1;
    for (std::size_t t = 0; t < fc1.size(); ++t) fc1[t].name = texts[t].c_str();
    map_module(model, names, expert + "linear_fc1", begin, fc1, out);
    const std::string fc2 = numbered(names.experts.fc2, i);
    map_module(model, names, expert + "linear_fc2", begin, {{fc2.c_str()}}, out);
  }
}

bool matches(std::string_view glob, std::string_view text) {
  const std::size_t star = glob.find('*');
  if (star == std::string_view::npos) return glob == text;
  const std::string_view tail = glob.substr(star + 1);
  return text.size() >= glob.size() - 1 && text.starts_with(glob.substr(0, star)) && text.ends_with(tail);
}

}  // namespace

const ModelSpec& naming_spec(const Architecture& config) {
  if (const ModelSpec& own = spec_of(config.model.family); own.architectures.empty()) return own;
  for (const ModelSpec& row : families()) {
    if (config.type.empty() ? row.names_untyped : config.type == row.name) return row;
  }
  throw CheckpointError("no model type '" + config.type + "' is known");
}

std::string head_name(const ModelSpec& spec) { return std::string(spec.names.head) + ".weight"; }
std::string stored_head_name(const ModelSpec& spec) {
  return std::string(spec.names.stored_head ? spec.names.stored_head : spec.names.head) + ".weight";
}

/// Holds also for what Tessera's own folders may have and the type in Transformers has not: grouped heads,
/// missing biases, other norms, gates and positions.
std::vector<HfMapping> map_names(const Architecture& config, const std::string& prefix,
                                 const std::string& head, HfForm form) {
  const ModelConfig& m = config.model;
  const HfNames& names = naming_spec(config).names;
  std::vector<HfMapping> out;
  const auto table = [&](const char* ours, const std::string& theirs, std::int64_t rows) {
    out.push_back({ours, {rows, m.hidden_size}, {{theirs, {rows, m.hidden_size}}}});
  };
  table(kEmbedding, prefix + names.embedding + ".weight", m.vocab_size);
  if (m.position_embedding == PositionKind::learned)
    table(kPositions, prefix + names.positions + ".weight", m.max_positions);
  map_beside(m, names, prefix, names.front, out);
  const auto layers = [&](const char* ours, const char* theirs, const std::vector<HfParameter>& list,
                          std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::string number = std::to_string(i) + ".";
      for (const HfParameter& each : list) {
        if (each.only && !each.only(m)) continue;
        const std::string_view name = each.ours;
        const bool fc1 = name == "mlp.linear_fc1", fc2 = name == "mlp.linear_fc2";
        if (experts_of(m, i) == 0 || !(fc1 || fc2)) {
          map_module(m, names, ours + number + each.ours, prefix + theirs + number, each.theirs, out);
        } else if (fc1) {
          const auto map = form == HfForm::files ? map_experts : map_stacked;
          map(m, names, ours + number, prefix + theirs + number, out);
        }
      }
    }
  };
  const std::int64_t encoder = names.encoder_layers ? m.encoder_layers.value_or(0) : 0;
  if (names.encoder_layers) layers("encoder.layers.", names.encoder_layers, names.encoder_layer, encoder);
  map_beside(m, names, prefix, names.encoder_end, out);
  layers("decoder.layers.", names.layers, names.layer, m.num_layers - encoder);
  if (names.final_norm) map_module(m, names, "decoder.final_layernorm", prefix, {{names.final_norm}}, out);
  map_beside(m, names, prefix, names.end, out);
  if (!m.tied_head) table("output_layer.weight", head, m.vocab_size);
  return out;
}

bool is_stored_buffer(const ModelSpec& spec, const std::string& prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return false;
  const auto& globs = spec.names.buffers;
  return std::any_of(globs.begin(), globs.end(),
                     [&](const char* glob) { return matches(glob, name.substr(prefix.size())); });
}

}  // namespace checkpoint_detail

std::int64_t stored_row(const HfPart& part, std::int64_t row) {
  const std::int64_t heads = part.shape[0] / part.head_dim, queries = heads / part.groups - 2;
  const std::int64_t head = row / part.head_dim, keys = part.groups * queries;
  const std::int64_t group = head < keys ? head / queries : (head - keys) % part.groups;
  const std::int64_t place = head < keys ? head % queries : queries + (head - keys) / part.groups;
  return (group * (queries + 2) + place) * part.head_dim + row % part.head_dim;
}

std::vector<HfMapping> hf_mappings(const Architecture& config) {
  const ModelSpec& spec = checkpoint_detail::naming_spec(config);
  return checkpoint_detail::map_names(config, spec.names.prefix, checkpoint_detail::head_name(spec));
}

std::vector<HfMapping> hf_module_mappings(const Architecture& config) {
  using namespace checkpoint_detail;
  const ModelSpec& spec = naming_spec(config);
  return map_names(config, spec.names.prefix, head_name(spec), HfForm::modules);
}

std::vector<TensorSpec> parameter_specs(const Architecture& config) {
  std::vector<TensorSpec> specs;
  for (const auto& mapping : checkpoint_detail::map_names(config, "", ""))
    specs.push_back({mapping.name, DType::f32, mapping.shape});
  return specs;
}

}  // namespace tessera
