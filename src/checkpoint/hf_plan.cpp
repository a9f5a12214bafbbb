#include "checkpoint/hf_plan.hpp"

#include <algorithm>
#include <unordered_map>

#include "checkpoint/hf_names.hpp"
#include "checkpoint/tessera_folder.hpp"
#include "checkpoint/transpose.hpp"

namespace tessera::checkpoint_detail {
namespace {

void append_part(const HfPart& part, std::span<const std::byte> rows, std::size_t element,
                 const HfAppend& append) {
  if (part.groups > 0) {
    const std::int64_t heads = part.shape[0] / part.head_dim;
    const std::size_t bytes = rows.size() / static_cast<std::size_t>(heads);
    std::vector<std::byte> stored(rows.size());
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto place = static_cast<std::size_t>(stored_row(part, head * part.head_dim) / part.head_dim);
      std::copy_n(rows.data() + static_cast<std::size_t>(head) * bytes, bytes, stored.data() + place * bytes);
    }
    return append(stored);
  }
  if (!part.transposed) return append(rows);
  for_row_blocks(part.shape, element, [&](std::int64_t row, std::int64_t count, std::span<std::byte> block) {
    take_rows_from_columns(rows, block, part.shape, row, count, element);
    append(block);
  });
}

}  // namespace

std::vector<TensorSpec> checked_specs(const Architecture& config, const WeightSource& weights) {
  std::unordered_map<std::string, TensorSpec> given;
  for (TensorSpec& spec : weights.tensors()) given.emplace(spec.name, std::move(spec));
  std::string problems;
  std::vector<TensorSpec> specs;
  for (const TensorSpec& wanted : parameter_specs(config)) {
    const auto it = given.find(wanted.name);
    if (it == given.end()) {
      problems += detail::concat("; missing: ", wanted.name, " ", wanted.shape);
    } else if (!(it->second.shape == wanted.shape)) {
      problems += detail::concat("; ", wanted.name, " is ", it->second.shape, ", not ", wanted.shape);
    } else {
      specs.push_back(it->second);
    }
    if (it != given.end()) given.erase(it);
  }
  for (const auto& [name, spec] : given) problems += detail::concat("; unexpected: ", name, " ", spec.shape);
  TESSERA_CHECK(problems.empty(), "the weights do not fit the model's configuration", problems);
  return specs;
}

std::span<const std::byte> WeightStage::read(const TensorSpec& spec, DType dtype) {
  raw_.resize(spec.bytes());
  weights_.read(spec.name, raw_);
  if (dtype == spec.dtype) return raw_;
  converted_.resize(static_cast<std::size_t>(spec.shape.numel()) * size_of(dtype));
  convert_floats(spec.dtype, raw_, dtype, converted_);
  return converted_;
}

HfPlan plan_names(const Architecture& config, const HfSource* source, const std::vector<TensorSpec>& specs,
                  std::optional<DType> dtype) {
  HfPlan plan;
  const ModelSpec& spec = naming_spec(config);
  const bool own_head = source && source->weight_map.contains(head_name(spec));
  plan.mappings = map_names(config, source ? source->prefix : spec.names.prefix,
                            own_head ? head_name(spec) : stored_head_name(spec));
  if (source) {
    plan.mappings.front().parts.front().name = source->embedding_names.front();
    plan.embedding_copies.assign(source->embedding_names.begin() + 1, source->embedding_names.end());
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    for (const HfPart& part : plan.mappings[i].parts)
      plan.tensors.push_back({part.name, dtype.value_or(specs[i].dtype), part.shape});
  }
  for (const std::string& name : plan.embedding_copies)
    plan.tensors.push_back({name, plan.tensors.front().dtype, plan.tensors.front().shape});
  return plan;
}

std::string config_text(const Architecture& config, const ExportOptions& options, DType dtype) {
  if (!options.source) return make_hf_config(config, "", dtype);
  const std::string& original = options.source->config_json;
  if (!options.dtype) {
    Architecture described = parse_hf_config(original, "config.json");
    if (naming_spec(config).head_by_weights) described.model.tied_head = config.model.tied_head;
    if (described == config) return original;
  }
  return make_hf_config(config, original, dtype);
}

void write_tensors(
    const HfPlan& plan, const std::vector<TensorSpec>& specs, const WeightSource& weights,
    const std::function<void(const TensorSpec&, const std::function<void(const HfAppend&)>&)>& write) {
  WeightStage stage(weights);
  std::size_t next = 0;  // of the plan's tensors
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const DType dtype = plan.tensors[next].dtype;
    const std::span<const std::byte> all = stage.read(specs[i], dtype);
    std::span<const std::byte> left = all;
    for (const HfPart& part : plan.mappings[i].parts) {
      const TensorSpec& tensor = plan.tensors[next++];
      write(tensor, [&](const HfAppend& append) {
        append_part(part, left.first(tensor.bytes()), size_of(dtype), append);
      });
      left = left.subspan(tensor.bytes());
    }
    if (specs[i].name != kEmbedding) continue;
    for (std::size_t copy = plan.tensors.size() - plan.embedding_copies.size(); copy < plan.tensors.size();
         ++copy)
      write(plan.tensors[copy], [&](const HfAppend& append) { append(all); });
  }
}

}  // namespace tessera::checkpoint_detail
