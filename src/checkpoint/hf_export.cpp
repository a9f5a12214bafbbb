#include <algorithm>
#include <unordered_map>

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_names.hpp"
#include "checkpoint/tessera_folder.hpp"
#include "checkpoint/transpose.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/sharded.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

/// The weights' specs in model order, checked against the configuration.
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

/// Reads a tensor and hands it over in the dtype it is to be stored in; the buffers are used again for the
/// next one.
class Stage {
 public:
  explicit Stage(const WeightSource& weights) : weights_(weights) {}
  std::span<const std::byte> read(const TensorSpec& spec, DType dtype) {
    raw_.resize(spec.bytes());
    weights_.read(spec.name, raw_);
    if (dtype == spec.dtype) return raw_;
    converted_.resize(static_cast<std::size_t>(spec.shape.numel()) * size_of(dtype));
    convert_floats(spec.dtype, raw_, dtype, converted_);
    return converted_;
  }

 private:
  const WeightSource& weights_;
  std::vector<std::byte> raw_, converted_;
};

void append_part(ShardedWriter& writer, const HfPart& part, std::span<const std::byte> rows,
                 std::size_t element) {
  if (part.groups > 0) {
    const std::int64_t heads = part.shape[0] / part.head_dim;
    const std::size_t bytes = rows.size() / static_cast<std::size_t>(heads);
    std::vector<std::byte> stored(rows.size());
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto place = static_cast<std::size_t>(stored_row(part, head * part.head_dim) / part.head_dim);
      std::copy_n(rows.data() + static_cast<std::size_t>(head) * bytes, bytes, stored.data() + place * bytes);
    }
    return writer.append(part.name, stored);
  }
  if (!part.transposed) return writer.append(part.name, rows);
  for_row_blocks(part.shape, element, [&](std::int64_t row, std::int64_t count, std::span<std::byte> block) {
    take_rows_from_columns(rows, block, part.shape, row, count, element);
    writer.append(part.name, block);
  });
}

/// What a Hugging Face folder of this model is to contain.
struct HfPlan {
  std::vector<HfMapping> mappings;  ///< as many as parameters, in the same order
  std::vector<std::string> embedding_copies;
  std::vector<TensorSpec> tensors;
};

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

ShardedWriter::Options writer_options(const ExportOptions& options, const HfPlan& plan) {
  ShardedWriter::Options out;
  out.max_shard_bytes = options.max_shard_bytes.value_or(5'000'000'000);
  if (!options.source || options.max_shard_bytes) return out;
  const auto& known = options.source->weight_map;
  const bool fits = std::all_of(plan.tensors.begin(), plan.tensors.end(),
                                [&](const TensorSpec& spec) { return known.contains(spec.name); });
  out.index_metadata = options.source->index_metadata;
  if (!fits) return out;
  for (const TensorSpec& spec : plan.tensors) out.layout[spec.name] = known.at(spec.name);
  out.file_metadata = options.source->file_metadata;
  out.force_index = options.source->has_index;
  return out;
}

/// The original text where it still describes the model, else the same with what changed.
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

}  // namespace

std::vector<TensorSpec> ViewSource::tensors() const {
  std::vector<TensorSpec> specs;
  for (const TensorView& view : views_) specs.push_back({view.name, view.dtype, view.shape});
  return specs;
}

void ViewSource::read(const std::string& name, std::span<std::byte> out) const {
  const auto it =
      std::find_if(views_.begin(), views_.end(), [&](const TensorView& view) { return view.name == name; });
  TESSERA_CHECK(it != views_.end(), "there is no tensor '", name, "'");
  TESSERA_CHECK_EQ(it->bytes(), out.size(), "bytes of '", name, "'");
  std::copy_n(it->data, out.size(), out.data());
}

void write_hf(const fs::path& folder, const Architecture& config, const WeightSource& weights,
              const ExportOptions& options) {
  const std::vector<TensorSpec> specs = checked_specs(config, weights);
  const HfPlan plan = plan_names(config, options.source, specs, options.dtype);
  const std::string config_json = config_text(config, options, plan.tensors.front().dtype);
  ShardedWriter writer(folder, plan.tensors, writer_options(options, plan));
  Stage stage(weights);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const DType dtype = options.dtype.value_or(specs[i].dtype);
    const std::span<const std::byte> all = stage.read(specs[i], dtype);
    std::span<const std::byte> left = all;
    for (const HfPart& part : plan.mappings[i].parts) {
      const std::size_t bytes = static_cast<std::size_t>(part.shape.numel()) * size_of(dtype);
      append_part(writer, part, left.first(bytes), size_of(dtype));
      left = left.subspan(bytes);
    }
    if (specs[i].name != kEmbedding) continue;
    for (const std::string& name : plan.embedding_copies) writer.append(name, all);
  }
  writer.finish();
  if (!options.extra_files.empty()) copy_extra_files(options.extra_files, folder, options.links);
  write_text(folder / "config.json", config_json);
  open_hf(folder);  // read back what will be trusted later
}

void export_hf(const fs::path& out, const Architecture& config, const WeightSource& weights,
               const ExportOptions& options) {
  require_unused(out);
  StagedDirectory folder(out, Existing::refuse);
  write_hf(folder.path(), config, weights, options);
  folder.publish();
}

void write_tessera(const fs::path& folder, const Architecture& config, const WeightSource& weights,
                   const ExportOptions& options) {
  const std::vector<TensorSpec> specs = checked_specs(config, weights);
  std::vector<TensorSpec> stored = specs;
  for (TensorSpec& spec : stored) spec.dtype = options.dtype.value_or(spec.dtype);
  ShardedWriter::Options writer_options;
  writer_options.max_shard_bytes = UINT64_MAX;
  writer_options.metadata = {{"format", "tessera"}};
  ShardedWriter writer(folder, stored, std::move(writer_options));
  Stage stage(weights);
  for (std::size_t i = 0; i < specs.size(); ++i)
    writer.append(specs[i].name, stage.read(specs[i], stored[i].dtype));
  writer.finish();
  if (!options.extra_files.empty()) copy_extra_files(options.extra_files, folder, options.links);
  write_tessera_json(folder, config, options.source);
  open_tessera(folder);
}

void export_tessera(const fs::path& out, const Architecture& config, const WeightSource& weights,
                    const ExportOptions& options) {
  require_unused(out);
  StagedDirectory folder(out, Existing::refuse);
  write_tessera(folder.path(), config, weights, options);
  folder.publish();
}

void convert_from_hf(const fs::path& dir, const fs::path& out, SymbolicLinks links) {
  const HfModel model = open_hf(dir, links);
  export_tessera(out, model.config(), model,
                 {.dtype = {}, .source = model.source(), .extra_files = dir, .links = links});
}

void convert_to_hf(const fs::path& dir, const fs::path& out, SymbolicLinks links) {
  const HfModel model = open_tessera(dir, links);
  export_hf(out, model.config(), model,
            {.dtype = {}, .source = model.source(), .extra_files = dir, .links = links});
}

}  // namespace tessera
