#include <algorithm>

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_plan.hpp"
#include "checkpoint/tessera_folder.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/sharded.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

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

/// Of a Tessera folder.
std::vector<TensorSpec> stored_specs(const Architecture& config, const WeightSource& weights,
                                     const ExportOptions& options) {
  std::vector<TensorSpec> stored = checked_specs(config, weights);
  for (TensorSpec& spec : stored) spec.dtype = options.dtype.value_or(spec.dtype);
  return stored;
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
  write_tensors(plan, specs, weights, [&](const TensorSpec& tensor, const auto& body) {
    body([&](std::span<const std::byte> bytes) { writer.append(tensor.name, bytes); });
  });
  writer.finish();
  if (!options.extra_files.empty()) copy_extra_files(options.extra_files, folder, options.links);
  write_text(folder / "config.json", config_json);
  open_hf(folder);  // read back what will be trusted later
}

void export_hf(const fs::path& out, const Architecture& config, const WeightSource& weights,
               const ExportOptions& options) {
  require_unused(out);
  const HfPlan plan = plan_names(config, options.source, checked_specs(config, weights), options.dtype);
  require_room_for(out, total_bytes(plan.tensors));
  StagedDirectory folder(out, Existing::refuse);
  write_hf(folder.path(), config, weights, options);
  folder.publish();
}

void write_tessera(const fs::path& folder, const Architecture& config, const WeightSource& weights,
                   const ExportOptions& options) {
  const std::vector<TensorSpec> specs = checked_specs(config, weights);
  const std::vector<TensorSpec> stored = stored_specs(config, weights, options);
  ShardedWriter::Options writer_options;
  writer_options.max_shard_bytes = UINT64_MAX;
  writer_options.metadata = {{"format", "tessera"}};
  ShardedWriter writer(folder, stored, std::move(writer_options));
  WeightStage stage(weights);
  for (std::size_t i = 0; i < specs.size(); ++i)
    stage.hand_over(specs[i], TensorSlice::whole(specs[i].shape), stored[i].dtype,
                    [&](std::span<const std::byte> bytes) { writer.append(specs[i].name, bytes); });
  writer.finish();
  if (!options.extra_files.empty()) copy_extra_files(options.extra_files, folder, options.links);
  write_tessera_json(folder, config, options.source);
  open_tessera(folder);
}

void export_tessera(const fs::path& out, const Architecture& config, const WeightSource& weights,
                    const ExportOptions& options) {
  require_unused(out);
  require_room_for(out, total_bytes(stored_specs(config, weights, options)));
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
