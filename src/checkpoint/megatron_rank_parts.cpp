#include "checkpoint/megatron_rank_parts.hpp"

#include <algorithm>
#include <array>

#include "checkpoint/megatron_names.hpp"
#include "tessera/base/families.hpp"

namespace tessera::checkpoint_detail {
namespace {

constexpr const char* kHead = "output_layer.weight";
/// How names of what the last stage has begin.
constexpr std::array kEnd = {"decoder.final_", "pooler.", "lm_head.", "binary_head.", "output_layer."};

/// Of a legacy BERT: one dictionary after the other, a module's own parameters before those of its modules.
int place_in_bert(const std::vector<std::string>& path) {
  if (path[0] == "language_model") return 0;
  if (path[0] == "lm_head") return path[1] == "bias" ? 1 : 2;
  return path[0] == "binary_head" ? 3 : 4;
}

/// Megatron Core registers an attention's output projection before those of its input.
void order_as_core(std::vector<RankPart>& parts) {
  const auto holds = [](const RankPart& each, const char* module) {
    return each.path[0].find(module) != std::string::npos;
  };
  const auto of_input = [&](const RankPart& each) {
    return holds(each, "attention.linear_q") || holds(each, "attention.linear_kv.");
  };
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t j = i; j > 0 && holds(parts[j], "attention.linear_proj.") && of_input(parts[j - 1]); --j)
      std::swap(parts[j], parts[j - 1]);
  }
}

}  // namespace

RankParts::RankParts(const Architecture& config, const WeightSource& weights,
                     const MegatronExportOptions& options, const RunSource* run)
    : model_(config.model),
      options_(options),
      run_(run),
      weights_(weights),
      values_{Value{run, RunValue::weight}, Value{run, RunValue::exp_avg}, Value{run, RunValue::exp_avg_sq}},
      runs_{WeightStage(values_[0]), WeightStage(values_[1]), WeightStage(values_[2])} {
  const std::int64_t step = options.vocab_divisible_by * options.tensor;
  padded_ = (model_.vocab_size + step - 1) / step * step;
  for (TensorSpec& spec : weights.tensors()) specs_.push_back(std::move(spec));
  const std::vector<TensorSpec> wanted = parameter_specs(config);
  for (const TensorSpec& each : wanted) {
    const auto it =
        std::find_if(specs_.begin(), specs_.end(), [&](const TensorSpec& s) { return s.name == each.name; });
    TESSERA_CHECK(it != specs_.end() && it->shape == each.shape,
                  "the weights do not fit the model's configuration: ", each.name, " ", each.shape,
                  " is missing or of another shape");
    order_.push_back(static_cast<std::size_t>(it - specs_.begin()));
  }
  TESSERA_CHECK_EQ(wanted.size(), specs_.size(), "tensors of the model");
}

std::vector<RankPart> RankParts::as_registered(std::vector<RankPart> parts) const {
  const MegatronStacks stacks = stacks_of(model_);
  std::erase_if(parts, [&](const RankPart& each) {
    const char* second = second_name(stacks, each.ours);
    return second && each.path == std::vector<std::string>{second};
  });
  const auto named = [&](std::string_view first) {
    return std::find_if(parts.begin(), parts.end(),
                        [&](const RankPart& each) { return each.path[0] == first; });
  };
  const auto copy = named("word_embeddings_for_head"), head = named("lm_head");
  if (copy != parts.end() && options_.pipeline == 1) {
    parts.erase(copy);
  } else if (copy != parts.end() && head < copy) {
    std::rotate(head, copy, copy + 1);
  }
  return parts;
}

void RankParts::add(std::vector<RankPart>& parts, const TensorSpec& spec,
                    std::vector<std::string> path) const {
  Shape shape = spec.shape;
  switch (tensor_split(spec.name)) {
    case TensorSplit::vocabulary:
      shape[0] = padded_ / options_.tensor;
      break;
    case TensorSplit::rows:
    case TensorSplit::query_key_value:
    case TensorSplit::key_value:
    case TensorSplit::gate_up:
      shape[0] /= options_.tensor;
      break;
    case TensorSplit::columns:
      shape[1] /= options_.tensor;
      break;
    case TensorSplit::none:
      break;
  }
  parts.push_back({spec.name, std::move(path), shape, options_.dtype.value_or(spec.dtype), std::nullopt, 0});
}

std::vector<RankPart> RankParts::of_stage(std::int64_t stage) const {
  const std::int64_t stages = options_.pipeline * options_.virtual_stages;
  const std::int64_t layers = model_.num_layers / stages, first = stage * layers;
  const bool is_first = stage == 0, is_last = stage + 1 == stages;
  const MegatronStacks stacks = stacks_of(model_);
  const bool legacy = options_.names == MegatronExportOptions::Names::legacy;
  std::vector<RankPart> parts;
  for (const std::size_t i : order_) {
    const TensorSpec& spec = specs_[i];
    LayerName name = layer_name(spec.name);
    const bool end = spec.name == kHead || std::ranges::any_of(kEnd, [&](const char* begin) {
                       return spec.name.starts_with(begin);
                     });
    const bool here = stacks == MegatronStacks::both ||
                      (name.layer >= 0 ? name.layer >= first && name.layer < first + layers
                       : end           ? is_last
                                       : is_first);
    if (!here) continue;
    if (name.layer >= 0) name.layer -= first;
    add(parts, spec, megatron_path(options_.names, name, stacks));
    const char* second = legacy ? nullptr : second_name(stacks, spec.name);
    if (second) add(parts, spec, {second});
  }
  // Megatron's model and the converter of Transformers look for the tied head of the last stage here.
  if (model_.tied_head && is_last && stacks != MegatronStacks::both && (legacy || !is_first))
    add(parts, specs_[order_.front()],
        legacy ? std::vector<std::string>{"word_embeddings_for_head", "weight"}
               : std::vector<std::string>{kHead});
  if (!legacy) order_as_core(parts);
  if (legacy && stacks == MegatronStacks::encoder)
    std::ranges::stable_sort(parts, {}, [](const RankPart& each) { return place_in_bert(each.path); });
  return parts;
}

void RankParts::Value::read(const std::string& name, std::span<std::byte> out) const {
  run_->read(value_, name, {reinterpret_cast<float*>(out.data()), out.size() / sizeof(float)});
}

const TensorSpec& RankParts::spec_of(const std::string& name) const {
  return *std::find_if(specs_.begin(), specs_.end(), [&](const TensorSpec& s) { return s.name == name; });
}

void RankParts::write(const RankPart& part, std::int64_t tensor_rank, const HfAppend& append) {
  if (part.ours.empty()) {
    return append(std::as_bytes(std::span(&part.number, 1)));
  }
  TensorSpec spec = spec_of(part.ours);
  if (part.value) spec.dtype = DType::f32;
  WeightStage& stage = part.value ? runs_[static_cast<std::size_t>(*part.value)] : weights_;
  const std::vector<TensorSlice> boxes = rank_boxes(
      {.model = model_, .ranks = options_.tensor, .rank = tensor_rank, .padded_vocabulary = padded_},
      part.ours, spec.shape);
  const TensorSplit split = tensor_split(part.ours);
  if (split == TensorSplit::query_key_value || split == TensorSplit::key_value)
    return write_groups(part, boxes, stage, spec, append);
  std::int64_t rows = 0;
  for (const TensorSlice& box : boxes) {
    stage.hand_over(spec, box, part.dtype, append);
    rows += box.shape[0];
  }
  write_padding(part, part.shape[0] - rows, stage, spec, append);
}

/// By group of heads: its queries, its key, its value, or its key and value alone.
void RankParts::write_groups(const RankPart& part, std::span<const TensorSlice> boxes, WeightStage& stage,
                             const TensorSpec& spec, const HfAppend& append) {
  const std::int64_t groups = model_.num_kv_heads / options_.tensor;
  const std::size_t row = static_cast<std::size_t>(part.shape.numel() / part.shape[0]) * size_of(part.dtype);
  heads_.resize(static_cast<std::size_t>(part.shape[0]) * row);
  std::vector<std::span<std::byte>> kinds(boxes.size());
  std::span<std::byte> left = heads_;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    kinds[i] = left.first(static_cast<std::size_t>(boxes[i].shape[0]) * row);
    left = left.subspan(kinds[i].size());
    stage.read(spec, boxes[i], part.dtype, kinds[i]);
  }
  for (std::int64_t group = 0; group < groups; ++group) {
    for (const std::span<std::byte> kind : kinds) {
      const std::size_t own = kind.size() / static_cast<std::size_t>(groups);
      append(kind.subspan(static_cast<std::size_t>(group) * own, own));
    }
  }
}

/// Rows that pad the vocabulary: of weights copies of the last one, of moments zeros.
void RankParts::write_padding(const RankPart& part, std::int64_t rows, WeightStage& stage,
                              const TensorSpec& spec, const HfAppend& append) {
  if (rows == 0) return;
  std::vector<std::byte> row(static_cast<std::size_t>(part.shape.numel() / part.shape[0]) *
                             size_of(part.dtype));
  const std::int64_t last = spec.shape[0] - 1;
  const bool moments = part.value && *part.value != RunValue::weight;
  if (!moments) stage.read(spec, TensorSlice::rows(spec.shape, last, last + 1), part.dtype, row);
  for (std::int64_t i = 0; i < rows; ++i) append(row);
}

}  // namespace tessera::checkpoint_detail
