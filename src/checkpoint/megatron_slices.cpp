#include "checkpoint/megatron_slices.hpp"

#include <algorithm>

#include "checkpoint/megatron_names.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {
namespace {

void take_vocabulary(const RankCut& cut, const RankPart& part, std::span<const std::byte> whole,
                     std::span<std::byte> out) {
  const std::int64_t all = cut.model.vocab_size;
  const std::size_t row = out.size() / static_cast<std::size_t>(part.shape[0]);
  for (std::int64_t i = 0; i < part.shape[0]; ++i) {
    const std::int64_t from = cut.rank * part.shape[0] + i;
    const std::span<std::byte> to = out.subspan(static_cast<std::size_t>(i) * row, row);
    if (from < all || cut.pad_with_last) {
      std::copy_n(whole.data() + static_cast<std::size_t>(std::min(from, all - 1)) * row, row, to.data());
    } else {
      std::ranges::fill(to, std::byte{0});
    }
  }
}

void take_columns(std::span<const std::byte> whole, std::int64_t rank, std::size_t part,
                  std::span<std::byte> out) {
  const std::size_t rows = out.size() / part, row = whole.size() / rows;
  for (std::size_t i = 0; i < rows; ++i)
    std::copy_n(whole.data() + i * row + static_cast<std::size_t>(rank) * part, part, out.data() + i * part);
}

void take_rows(std::span<const std::byte> whole, std::int64_t rank, std::size_t halves,
               std::span<std::byte> out) {
  const std::size_t block = out.size() / halves;
  for (std::size_t half = 0; half < halves; ++half)
    std::copy_n(whole.data() + half * (whole.size() / halves) + static_cast<std::size_t>(rank) * block, block,
                out.data() + half * block);
}

/// By group of heads: its queries, its key, its value.
void take_query_key_value(const RankCut& cut, std::span<const std::byte> whole, std::int64_t rows,
                          std::span<std::byte> out) {
  const std::int64_t all = rows * cut.ranks, width = cut.model.head_dim, heads = all / width,
                     own = heads / cut.ranks;
  const std::size_t head_bytes = whole.size() / static_cast<std::size_t>(heads);
  const HfPart grouped{"", Shape{all}, false, cut.model.num_kv_heads, width};
  for (std::int64_t head = 0; head < heads; ++head) {
    const std::int64_t place = stored_row(grouped, head * width) / width - cut.rank * own;
    if (place < 0 || place >= own) continue;
    std::copy_n(whole.data() + static_cast<std::size_t>(head) * head_bytes, head_bytes,
                out.data() + static_cast<std::size_t>(place) * head_bytes);
  }
}

/// Numbers of a group's parameters.
struct GroupNumbers {
  std::int64_t first = 0, count = 0;
};

/// `params`: nothing where a group does not say which are its own.
void write_group(TorchPickle& pickle, const RunSource& run, bool decay, std::optional<GroupNumbers> params) {
  const OptimizerConfig& o = run.config().optimizer;
  pickle.begin_dict();
  pickle.text("lr").real(o.lr).text("betas").begin_list().real(o.betas[0]).real(o.betas[1]).end_list();
  pickle.text("eps").real(o.eps).text("weight_decay").real(decay ? o.weight_decay : 0.0);
  pickle.text("bias_correction").boolean(true).text("step").integer(run.counters().updates);
  pickle.text("wd_mult").real(decay ? 1.0 : 0.0).text("lr_mult").real(1.0);
  pickle.text("is_expert_parallel").boolean(false).text("is_decoupled_lr").boolean(false);
  if (params) {
    pickle.text("params").begin_list();
    for (std::int64_t i = 0; i < params->count; ++i) pickle.integer(params->first + i);
    pickle.end_list();
  }
  pickle.end_dict();
}

/// The state of the factor on the loss, where it moves; its tensor is added to `parts`.
void write_scaler(TorchPickle& pickle, const RunSource& run, std::vector<RankPart>& parts) {
  const TrainingConfig& training = run.config().training;
  if (training.precision != Precision::fp16 || training.loss_scale) return;
  const RunCounters& c = run.counters();
  pickle.text("grad_scaler").begin_dict().text("scale").tensor(DType::f32, Shape{1});
  parts.push_back({"", {}, Shape{1}, DType::f32, std::nullopt});
  pickle.text("growth_tracker").integer(c.good_steps).text("hysteresis_tracker").integer(c.hysteresis);
  pickle.end_dict();
}

}  // namespace

void cut_rank(const RankCut& cut, const RankPart& part, std::span<const std::byte> whole,
              std::span<std::byte> out) {
  switch (tensor_split(part.ours)) {
    case TensorSplit::none:
      std::ranges::copy(whole, out.begin());
      return;
    case TensorSplit::vocabulary:
      return take_vocabulary(cut, part, whole, out);
    case TensorSplit::columns:
      return take_columns(whole, cut.rank, static_cast<std::size_t>(part.shape[1]) * size_of(part.dtype),
                          out);
    case TensorSplit::gate_up:
      return take_rows(whole, cut.rank, cut.model.activation == MlpActivation::swiglu ? 2 : 1, out);
    case TensorSplit::query_key_value:
      return take_query_key_value(cut, whole, part.shape[0], out);
  }
}

void write_run_optimizer(TorchPickle& pickle, const RunSource& run, const std::vector<RankPart>& parameters,
                         std::vector<RankPart>& parts) {
  const Precision precision = run.config().training.precision;
  std::vector<const RankPart*> ordered;  // by group
  std::int64_t counts[2] = {0, 0};
  for (const bool decay : {true, false}) {
    for (const RankPart& each : parameters) {
      if (has_weight_decay(each.ours, static_cast<std::size_t>(each.shape.rank())) != decay) continue;
      ordered.push_back(&each);
      ++counts[decay ? 0 : 1];
    }
  }
  const auto tensor = [&](const RankPart& part, RunValue value) {
    pickle.tensor(DType::f32, part.shape);
    parts.push_back({part.ours, part.path, part.shape, DType::f32, value});
  };
  if (precision != Precision::fp32) pickle.begin_dict().text("optimizer");
  pickle.begin_dict().text("state").begin_dict();
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    pickle.integer(static_cast<std::int64_t>(i)).begin_dict();
    pickle.text("exp_avg");
    tensor(*ordered[i], RunValue::exp_avg);
    pickle.text("exp_avg_sq");
    tensor(*ordered[i], RunValue::exp_avg_sq);
    pickle.end_dict();
  }
  pickle.end_dict().text("param_groups").begin_list();
  write_group(pickle, run, true, GroupNumbers{0, counts[0]});
  write_group(pickle, run, false, GroupNumbers{counts[0], counts[1]});
  pickle.end_list().end_dict();
  if (precision == Precision::fp32) return;
  write_scaler(pickle, run, parts);
  pickle.text("fp32_from_fp16_params").begin_list();
  for (std::size_t i = 0, group = 0; group < 2; ++group) {
    pickle.begin_list();
    for (std::int64_t n = 0; n < counts[group]; ++n) tensor(*ordered[i++], RunValue::weight);
    pickle.end_list();
  }
  pickle.end_list().end_dict();
}

void write_optimizer_facts(TorchPickle& pickle, const RunSource& run, const MegatronExportOptions& options,
                           std::vector<RankPart>& parts) {
  const bool distributed = options.distributed_optimizer;
  const bool inner = distributed || run.config().training.precision != Precision::fp32;
  pickle.begin_dict();
  if (inner) pickle.text("optimizer").begin_dict();
  pickle.text("param_groups").begin_list();
  write_group(pickle, run, true, std::nullopt);
  write_group(pickle, run, false, std::nullopt);
  pickle.end_list();
  if (inner) {
    pickle.end_dict();
    write_scaler(pickle, run, parts);
  }
  if (distributed && options.format == MegatronExportOptions::Format::torch_dist)
    pickle.text("param_state_sharding_type").text(kReshardable);
  pickle.end_dict();
}

}  // namespace tessera::checkpoint_detail
