#include "checkpoint/megatron_slices.hpp"

#include <algorithm>

#include "checkpoint/megatron_names.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {
namespace {

TensorSlice rows(const Shape& whole, std::int64_t first, std::int64_t count) {
  TensorSlice box = TensorSlice::whole(whole);
  box.offset[0] = first;
  box.shape[0] = count;
  return box;
}

/// The rank's part of each of equally large ranges of rows.
std::vector<TensorSlice> parts_of_rows(const RankCut& cut, const Shape& whole, std::int64_t ranges) {
  const std::int64_t range = whole[0] / ranges, own = range / cut.ranks;
  std::vector<TensorSlice> boxes;
  for (std::int64_t i = 0; i < ranges; ++i) boxes.push_back(rows(whole, i * range + cut.rank * own, own));
  return boxes;
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

/// A tensor of one number, which is added to `parts`.
void write_number(TorchPickle& pickle, const Shape& shape, double number, std::vector<RankPart>& parts) {
  pickle.tensor(DType::f32, shape);
  parts.push_back({"", {}, shape, DType::f32, std::nullopt, static_cast<float>(number)});
}

/// The state of the factor on the loss, where it moves; its tensor is added to `parts`.
void write_scaler(TorchPickle& pickle, const RunSource& run, std::vector<RankPart>& parts) {
  const TrainingConfig& training = run.config().training;
  if (training.precision != Precision::fp16 || training.loss_scale) return;
  const RunCounters& c = run.counters();
  pickle.text("grad_scaler").begin_dict().text("scale");
  write_number(pickle, Shape{1}, c.loss_scale, parts);
  pickle.text("growth_tracker").integer(c.good_steps).text("hysteresis_tracker").integer(c.hysteresis);
  pickle.end_dict();
}

}  // namespace

std::vector<TensorSlice> rank_boxes(const RankCut& cut, const std::string& name, const Shape& whole) {
  const ModelConfig& m = cut.model;
  switch (tensor_split(name)) {
    case TensorSplit::none:
      break;
    case TensorSplit::vocabulary: {
      const std::int64_t own = cut.padded_vocabulary / cut.ranks, first = std::min(whole[0], cut.rank * own);
      return {rows(whole, first, std::min(whole[0] - first, own))};
    }
    case TensorSplit::columns: {
      TensorSlice box = TensorSlice::whole(whole);
      box.shape[1] /= cut.ranks;
      box.offset[1] = cut.rank * box.shape[1];
      return {box};
    }
    case TensorSplit::rows:
      return parts_of_rows(cut, whole, 1);
    case TensorSplit::key_value:
      return parts_of_rows(cut, whole, 2);
    case TensorSplit::gate_up:
      return parts_of_rows(cut, whole, m.activation == MlpActivation::swiglu ? 2 : 1);
    case TensorSplit::query_key_value: {
      const std::int64_t queries = m.num_heads * m.head_dim, keys = m.num_kv_heads * m.head_dim;
      std::vector<TensorSlice> boxes;
      for (const auto& [first, count] :
           {std::pair{std::int64_t{0}, queries}, std::pair{queries, keys}, std::pair{queries + keys, keys}})
        boxes.push_back(rows(whole, first + cut.rank * (count / cut.ranks), count / cut.ranks));
      return boxes;
    }
  }
  return {TensorSlice::whole(whole)};
}

void write_run_optimizer(TorchPickle& pickle, const RunSource& run, const std::vector<RankPart>& parameters,
                         const MegatronExportOptions& options, std::vector<RankPart>& parts) {
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
    parts.push_back({part.ours, part.path, part.shape, DType::f32, value, 0});
  };
  if (precision != Precision::fp32) pickle.begin_dict().text("optimizer");
  pickle.begin_dict().text("state").begin_dict();
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    pickle.integer(static_cast<std::int64_t>(i)).begin_dict();
    pickle.text("exp_avg");
    tensor(*ordered[i], RunValue::exp_avg);
    pickle.text("exp_avg_sq");
    tensor(*ordered[i], RunValue::exp_avg_sq);
    if (options.torch_adam) {
      pickle.text("step");
      write_number(pickle, Shape{}, static_cast<double>(run.counters().updates), parts);
    }
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
  if (options.torch_adam) {
    pickle.text("state").begin_dict().text("common_step");
    write_number(pickle, Shape{}, static_cast<double>(run.counters().updates), parts);
    pickle.end_dict();
  }
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
