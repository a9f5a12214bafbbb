#include "checkpoint/hf_plan.hpp"

#include <algorithm>
#include <future>
#include <unordered_map>

#include "checkpoint/hf_names.hpp"
#include "checkpoint/slice_runs.hpp"
#include "checkpoint/tessera_folder.hpp"
#include "checkpoint/transpose.hpp"

namespace tessera::checkpoint_detail {
namespace {

constexpr std::int64_t kBlockBytes = 8 << 20;

/// A part whose rows lie otherwise in the file than in the parameter.
void append_reordered(const HfPart& part, std::span<const std::byte> rows, std::size_t element,
                      const HfAppend& append) {
  if (part.transposed) {
    return for_row_blocks(part.shape, element,
                          [&](std::int64_t row, std::int64_t count, std::span<std::byte> block) {
                            take_rows_from_columns(rows, block, part.shape, row, count, element);
                            append(block);
                          });
  }
  const std::int64_t heads = part.shape[0] / part.head_dim;
  const std::size_t bytes = rows.size() / static_cast<std::size_t>(heads);
  std::vector<std::size_t> stored(static_cast<std::size_t>(heads));  // by place in the file: which head
  for (std::int64_t head = 0; head < heads; ++head)
    stored[static_cast<std::size_t>(stored_row(part, head * part.head_dim) / part.head_dim)] =
        static_cast<std::size_t>(head);
  for (const std::size_t head : stored) append(rows.subspan(head * bytes, bytes));
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

void WeightStage::fetch(const TensorSpec& spec, const TensorSlice& box, std::span<std::byte> out) {
  if (held_ != spec.name && weights_.read_box(spec.name, box, out)) return;
  const TensorSlice all = TensorSlice::whole(spec.shape);
  if (box == all && held_ != spec.name) return weights_.read(spec.name, out);
  if (held_ != spec.name) {
    held_.clear();
    whole_.resize(spec.bytes());
    weights_.read(spec.name, whole_);
    held_ = spec.name;
  }
  for_each_run(all, box, box, size_of(spec.dtype),
               [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                 std::copy_n(whole_.data() + from, bytes, out.data() + to);
               });
}

void WeightStage::read(const TensorSpec& spec, const TensorSlice& box, DType dtype,
                       std::span<std::byte> out) {
  if (dtype == spec.dtype) return fetch(spec, box, out);
  raw_.resize(static_cast<std::size_t>(box.shape.numel()) * size_of(spec.dtype));
  fetch(spec, box, raw_);
  convert_floats(spec.dtype, raw_, dtype, out);
}

void WeightStage::hand_over(const TensorSpec& spec, const TensorSlice& box, DType dtype,
                            const HfAppend& append) {
  const std::int64_t rows = box.shape[0], row_elements = rows > 0 ? box.shape.numel() / rows : 0;
  const auto row_bytes = row_elements * static_cast<std::int64_t>(size_of(spec.dtype));
  const std::int64_t step = std::max<std::int64_t>(1, kBlockBytes / std::max<std::int64_t>(1, row_bytes));
  const auto read_from = [&](std::int64_t row, std::vector<std::byte>& block) {
    TensorSlice part = box;
    part.offset[0] += row;
    part.shape[0] = std::min(step, rows - row);
    block.resize(static_cast<std::size_t>(part.shape.numel()) * size_of(dtype));
    read(spec, part, dtype, block);
  };
  if (rows > 0) read_from(0, block_);
  for (std::int64_t row = 0; row < rows; row += step) {
    std::future<void> next;  // its end waits for the thread, whatever append does
    if (row + step < rows)
      next = std::async(std::launch::async, [&, row] { read_from(row + step, next_block_); });
    append(block_);
    if (next.valid()) next.get();
    block_.swap(next_block_);
  }
}

std::uint64_t total_bytes(std::span<const TensorSpec> tensors) {
  std::uint64_t bytes = 0;
  for (const TensorSpec& tensor : tensors) bytes += tensor.bytes();
  return bytes;
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
  std::vector<std::byte> reordered;
  std::size_t next = 0;  // of the plan's tensors
  for (std::size_t i = 0; i < specs.size(); ++i) {
    TensorSlice box = TensorSlice::whole(specs[i].shape);  // of the parameter: what the part gives it
    box.shape[0] = 0;
    for (const HfPart& part : plan.mappings[i].parts) {
      const TensorSpec& tensor = plan.tensors[next++];
      box.offset[0] += box.shape[0];
      box.shape[0] = part.shape[part.transposed ? 1 : 0];
      write(tensor, [&](const HfAppend& append) {
        if (!part.transposed && part.groups == 0) return stage.hand_over(specs[i], box, tensor.dtype, append);
        reordered.resize(tensor.bytes());
        stage.read(specs[i], box, tensor.dtype, reordered);
        append_reordered(part, reordered, size_of(tensor.dtype), append);
      });
    }
    if (specs[i].name != kEmbedding) continue;
    for (std::size_t copy = plan.tensors.size() - plan.embedding_copies.size(); copy < plan.tensors.size();
         ++copy)
      write(plan.tensors[copy], [&](const HfAppend& append) {
        stage.hand_over(specs[i], TensorSlice::whole(specs[i].shape), plan.tensors[copy].dtype, append);
      });
  }
}

}  // namespace tessera::checkpoint_detail
