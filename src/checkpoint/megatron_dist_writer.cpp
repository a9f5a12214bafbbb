#include "checkpoint/megatron_dist_writer.hpp"

#include <map>

#include "checkpoint/dcp_writer.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/megatron_args.hpp"
#include "checkpoint/megatron_names.hpp"
#include "checkpoint/megatron_rank_parts.hpp"
#include "checkpoint/megatron_training.hpp"

namespace tessera::checkpoint_detail {
namespace {

/// What of each layer may have a state of its own beside its weights, whoever implements it.
constexpr const char* kStateful[] = {"self_attention.linear_qkv", "self_attention.core_attention",
                                     "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"};
/// Of a layer that reads an encoder also:
constexpr const char* kReading[] = {"pre_cross_attn_layernorm", "cross_attention.linear_q",
                                    "cross_attention.linear_kv", "cross_attention.core_attention",
                                    "cross_attention.linear_proj"};

class DistWriter {
 public:
  DistWriter(const std::filesystem::path& folder, RankParts& ranks)
      : writer_(folder), ranks_(ranks), stacks_(stacks_of(ranks.model())) {
    for (RankPart& part : ranks.of_stage(0)) {
      const LayerName layer = layer_name(part.path[0]);
      const std::string key = layer.layer < 0 ? layer.rest : stack_of(layer.encoder) + "layers." + layer.rest;
      if (layer.layer <= 0) groups_.push_back({key, layer.layer >= 0, {}});
      for (Group& group : groups_) {
        if (group.key == key) group.parts.push_back(std::move(part));
      }
    }
  }

  /// All tensors of the weights, or of a value of the optimizer.
  void add(const std::string& prefix, std::optional<RunValue> value) {
    for (const Group& group : groups_) {
      for (std::size_t i = 0; i < group.parts.size(); ++i) {
        RankPart part = group.parts[i];
        part.value = value;
        if (value) part.dtype = DType::f32;
        add(prefix + group.key, group, part, static_cast<std::int64_t>(i));
      }
    }
  }

  /// States that hold nothing, under the names by which Megatron asks for them.
  void add_extra_states() {
    const auto add = [&](const std::string& module, std::int64_t i, std::int64_t count) {
      TorchPickle pickle;
      pickle.begin_list().none().end_list();
      writer_.add_blob(detail::concat(module, "._extra_state/shard_", i, "_", count), std::move(pickle));
    };
    const ModelConfig& m = ranks_.model();
    for (const bool encoder : {true, false}) {
      if (stacks_ != MegatronStacks::both && encoder != (stacks_ == MegatronStacks::encoder)) continue;
      const std::int64_t first = m.encoder_layers.value_or(0),
                         layers = stacks_ == MegatronStacks::both && encoder ? first : m.num_layers - first;
      const std::string stack = stack_of(encoder);
      for (std::int64_t i = 0; i < layers; ++i) {
        for (const char* module : kStateful) add(stack + "layers." + module, i, layers);
        if (stacks_ != MegatronStacks::both || encoder) continue;
        for (const char* module : kReading) add(stack + "layers." + module, i, layers);
      }
      add(stack + "final_layernorm", 0, 1);
    }
    if (stacks_ != MegatronStacks::decoder) add("output_layer", 0, 1);
    if (stacks_ == MegatronStacks::both) add("lm_head.output_layer", 0, 1);
  }
  void finish() { writer_.finish(std::nullopt); }

 private:
  /// A tensor of the checkpoint: of a layer those of all layers.
  struct Group {
    std::string key;
    bool of_layers = false;
    std::vector<RankPart> parts;
  };

  static std::string stack_of(bool encoder) { return encoder ? "encoder." : "decoder."; }

  void add(const std::string& name, const Group& group, const RankPart& part, std::int64_t layer) {
    std::vector<std::int64_t> shape(part.shape.dims().begin(), part.shape.dims().end()),
        offset(shape.size(), 0), own = shape;
    if (group.of_layers) {
      shape.insert(shape.begin(), static_cast<std::int64_t>(group.parts.size()));
      own.insert(own.begin(), 1);
      offset.insert(offset.begin(), layer);
    }
    writer_.add({name, part.dtype, Shape(std::span<const std::int64_t>(shape))},
                {Shape(std::span<const std::int64_t>(offset)), Shape(std::span<const std::int64_t>(own))},
                [&](const DcpWriter::Append& append) { ranks_.write(part, 0, append); });
  }

  DcpWriter writer_;
  RankParts& ranks_;
  MegatronStacks stacks_;
  std::vector<Group> groups_;
};

/// What is no tensor of the model or its optimizer. `options`: of the layout that the arguments name.
void write_common(const std::filesystem::path& path, RankParts& ranks, DType dtype,
                  const MegatronExportOptions& options) {
  const RunSource* run = ranks.run();
  std::vector<RankPart> parts;
  TorchPickle pickle;
  pickle.begin_dict().text("checkpoint_version").real(3.0).text("args");
  write_megatron_args(pickle, ranks.model(), ranks.padded_vocabulary(), dtype, options, run);
  pickle.text("iteration").integer(run ? run->counters().step : 0);
  if (run) {
    pickle.text("opt_param_scheduler");
    write_schedule(pickle, run->config(), run->counters());
    pickle.text("optimizer");
    write_optimizer_facts(pickle, *run, options, parts);
  }
  pickle.text("content_metadata").begin_dict().text("singleton_local_shards").boolean(false);
  pickle.text("chained_optim_avoid_prefix").boolean(true);
  if (run && options.distributed_optimizer) {
    pickle.text("distrib_optim_sharding_type").text(kReshardable);
    pickle.text("distrib_optim_fully_reshardable_mem_efficient").boolean(false);
  }
  pickle.end_dict().end_dict();
  write_torch_file(path, std::move(pickle),
                   [&](std::size_t i, const DcpWriter::Append& append) { ranks.write(parts[i], 0, append); });
}

/// What the optimizer keeps of each parameter, and how its tensors' names begin.
std::vector<std::pair<RunValue, const char*>> kept_values(const RunSource* run,
                                                          const MegatronExportOptions& options) {
  if (!run) return {};
  std::vector<std::pair<RunValue, const char*>> values;
  if (options.distributed_optimizer) {
    values.emplace_back(RunValue::weight, "optimizer.state.param.");
  } else if (run->config().training.precision != Precision::fp32) {
    values.emplace_back(RunValue::weight, "optimizer.state.fp32_param.");
  }
  values.emplace_back(RunValue::exp_avg, "optimizer.state.exp_avg.");
  values.emplace_back(RunValue::exp_avg_sq, "optimizer.state.exp_avg_sq.");
  return values;
}

}  // namespace

MegatronExportOptions undivided(const MegatronExportOptions& options) {
  MegatronExportOptions whole = options;
  whole.names = MegatronExportOptions::Names::transformer_engine;
  whole.vocab_divisible_by *= options.tensor;
  whole.tensor = whole.pipeline = whole.virtual_stages = 1;
  return whole;
}

std::uint64_t megatron_dist_bytes(const RankParts& parts, const MegatronExportOptions& options) {
  const std::size_t values = kept_values(parts.run(), options).size();
  std::uint64_t bytes = 0;
  for (const RankPart& part : parts.of_stage(0))
    bytes +=
        static_cast<std::uint64_t>(part.shape.numel()) * (size_of(part.dtype) + values * size_of(DType::f32));
  return bytes;
}

void write_megatron_dist(const std::filesystem::path& folder, RankParts& parts,
                         const MegatronExportOptions& options) {
  DistWriter writer(folder, parts);
  writer.add("", std::nullopt);
  for (const auto& [value, prefix] : kept_values(parts.run(), options)) writer.add(prefix, value);
  writer.add_extra_states();
  writer.finish();
  write_common(folder / "common.pt", parts, parts.of_stage(0).front().dtype, options);
  write_text(folder / "metadata.json", R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
                                       R"("common_backend": "torch", "common_backend_version": 1})");
}

}  // namespace tessera::checkpoint_detail
