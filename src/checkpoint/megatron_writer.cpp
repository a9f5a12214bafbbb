#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_names.hpp"
#include "checkpoint/megatron_args.hpp"
#include "checkpoint/megatron_buffer.hpp"
#include "checkpoint/megatron_dist_writer.hpp"
#include "checkpoint/megatron_names.hpp"
#include "checkpoint/megatron_rank_parts.hpp"
#include "checkpoint/megatron_training.hpp"
#include "checkpoint/torch_file.hpp"
#include "tessera/base/families.hpp"
#include "tessera/base/precision.hpp"
#include "tessera/checkpoint/megatron.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

bool is_bert(const ModelConfig& m) { return std::string_view(spec_of(m.family).body) == "megatron-bert"; }

/// What Megatron's GPT and BERT models can be.
void check_model(const ModelConfig& m, const MegatronExportOptions& options) {
  TESSERA_ENSURE(
      ConfigError, std::string_view(spec_of(m.family).body) != "t5",
      "T5 of Transformers is another model than Megatron's T5: its attention adds a bias by relative "
      "position, its norms take no mean and its layers have no biases; Megatron cannot hold it");
  TESSERA_ENSURE(ConfigError, !m.num_experts,
                 "models with experts (model.num_experts) are not written for Megatron in this build");
  const char* fault = nullptr;
  const bool is_t5 = stacks_of(m) == MegatronStacks::both;
  if (std::string_view(spec_of(m.family).body) != "decoder" && !is_bert(m) && !is_t5)
    fault = "is an encoder with its norms behind each branch";
  if (m.num_labels) fault = "has a head for classes of samples";
  if (is_bert(m) && is_gated(m.activation)) fault = "is an encoder with a gate";
  if (m.position_embedding == PositionKind::alibi) fault = "has ALiBi positions";
  if (m.parallel_residual) fault = "has attention and MLP side by side";
  if (m.sliding_window) fault = "has a window";
  if (m.activation == MlpActivation::relu || m.activation == MlpActivation::geglu)
    fault = "has another activation";
  if (m.qk_norm == QkNorm::head) fault = "norms queries and keys";
  if (m.norm_placement != NormPlacement::pre || m.norm_zero_centered || m.embedding_norm ||
      has_norm_bias(m) != (m.norm == NormStyle::layernorm))
    fault = "has other norms";
  if (m.embedding_scaled || m.attention_scale || m.attention_softcap > 0 || m.logit_softcap > 0)
    fault = "scales or caps embeddings, scores or logits";
  if (m.rope_scaling != RopeScaling{}) fault = "has scaled rotary positions";
  if (m.norm == NormStyle::rmsnorm && m.linear_bias) fault = "has RMSNorm and biases";
  if (has_proj_bias(m) != m.linear_bias) fault = "has a bias of the output projection of its own";
  if (m.linear_bias && !m.qkv_bias) fault = "has biases, but none of query, key and value";
  TESSERA_ENSURE(ConfigError, fault == nullptr, "this model ", fault, ", which Megatron's model has not");
  TESSERA_ENSURE(ConfigError, !is_t5 || options.pipeline == 1, "T5 is written for one stage, not ",
                 options.pipeline);
}

void check_layout(const ModelConfig& m, const MegatronExportOptions& options) {
  const std::int64_t t = options.tensor, p = options.pipeline, v = options.virtual_stages;
  TESSERA_ENSURE(ConfigError,
                 t >= 1 && p >= 1 && v >= 1 && options.data >= 1 && options.vocab_divisible_by >= 1,
                 "numbers of ranks and stages and the vocabulary's divisor are positive");
  TESSERA_ENSURE(ConfigError, v == 1 || p > 1, v, " virtual stages need two pipeline stages or more, not ",
                 p);
  TESSERA_ENSURE(ConfigError, m.num_heads % t == 0 && m.num_kv_heads % t == 0 && m.ffn_hidden_size % t == 0,
                 m.num_heads, " heads in ", m.num_kv_heads, " groups and ", m.ffn_hidden_size,
                 " features of the MLP do not divide by ", t, " tensor ranks");
  if (stacks_of(m) == MegatronStacks::both) return;
  TESSERA_ENSURE(ConfigError, m.num_layers % p == 0, m.num_layers, " layers do not divide by ", p, " stages");
  TESSERA_ENSURE(ConfigError, m.num_layers / p % v == 0, m.num_layers / p,
                 " layers of a stage do not divide by ", v, " virtual stages");
}

/// Keys in one nest of dictionaries, in the order of their first appearance.
void write_tree(TorchPickle& pickle, std::span<const RankPart> parts, std::size_t depth) {
  pickle.begin_dict();
  for (std::size_t i = 0; i < parts.size();) {
    std::size_t end = i + 1;
    while (end < parts.size() && parts[end].path[depth] == parts[i].path[depth]) ++end;
    pickle.text(parts[i].path[depth]);
    if (parts[i].path.size() == depth + 1) {
      pickle.tensor(parts[i].dtype, parts[i].shape);
    } else {
      write_tree(pickle, parts.subspan(i, end - i), depth + 1);
    }
    i = end;
  }
  pickle.end_dict();
}

/// An optimizer before its first step, with a group of no parameters.
void write_optimizer(TorchPickle& pickle) {
  pickle.text("optimizer")
      .begin_dict()
      .text("step")
      .integer(0)
      .text("param_groups")
      .begin_list()
      .begin_dict();
  for (const char* name : {"lr", "beta1", "beta2", "eps", "weight_decay"}) pickle.text(name).real(0.0);
  pickle.text("correct_bias").boolean(false).text("params").begin_list().end_list();
  pickle.end_dict().end_list().end_dict();
}

/// A rank's file of the distributed optimizer (2024 and later): one long tensor per chunk and value.
struct BufferFile {
  struct Chunk {
    std::vector<RankPart> parts;
    BufferLayout layout;
  };
  std::vector<Chunk> chunks;
  TorchPickle pickle;
};

/// What the files of a stage's ranks hold, the same for all of them but for the tensors' bytes.
struct StageFiles {
  TorchPickle pickle;
  std::vector<RankPart> parts;  ///< of all chunks
  std::optional<BufferFile> buffers;

  std::uint64_t bytes() const {
    return pickle.storage_bytes() + (buffers ? buffers->pickle.storage_bytes() : 0);
  }
};

BufferFile plan_buffers(const RankParts& of_ranks, const MegatronExportOptions& options, std::int64_t pp) {
  const bool shared = of_ranks.model().tied_head && options.pipeline > 1;
  BufferFile file;
  TorchPickle& pickle = file.pickle;
  pickle.begin_dict().text("buckets_coalesced").boolean(true);
  for (std::int64_t i = 0; i < options.virtual_stages; ++i) {
    BufferFile::Chunk& chunk = file.chunks.emplace_back();
    chunk.parts = of_ranks.as_registered(of_ranks.of_stage(i * options.pipeline + pp));
    std::vector<BufferParameter> parameters;
    for (const RankPart& each : chunk.parts)
      parameters.push_back({each.shape.numel(), shared && each.ours == kEmbedding});
    chunk.layout = buffer_layout(parameters, std::nullopt);
    pickle.integer(i).begin_dict().begin_tuple().dtype(chunk.parts.front().dtype).dtype(DType::f32);
    pickle.end_tuple().begin_dict();
    for (const char* name : {"param", "exp_avg", "exp_avg_sq"})
      pickle.text(name).tensor(DType::f32, Shape{chunk.layout.elements});
    pickle.text("numel_unpadded").integer(chunk.layout.elements).end_dict().end_dict();
  }
  pickle.end_dict();
  return file;
}

void write_buffers(const fs::path& path, RankParts& of_ranks, const BufferFile& file, std::int64_t tp) {
  write_torch_file(path, file.pickle, [&](std::size_t storage, const auto& append) {
    const BufferFile::Chunk& chunk = file.chunks[storage / std::size(kRunValues)];
    std::int64_t filled = 0;
    for (std::size_t i = chunk.parts.size(); i-- > 0;) {
      RankPart part = chunk.parts[i];
      part.value = kRunValues[storage % std::size(kRunValues)];
      part.dtype = DType::f32;
      const std::vector<std::byte> gap(static_cast<std::size_t>(chunk.layout.begins[i] - filled) * 4);
      append(std::span<const std::byte>(gap));
      of_ranks.write(part, tp, append);
      filled = chunk.layout.begins[i] + part.shape.numel();
    }
  });
}

StageFiles plan_stage(const RankParts& of_ranks, const MegatronExportOptions& options, std::int64_t pp) {
  const RunSource* run = of_ranks.run();
  StageFiles files;
  TorchPickle& pickle = files.pickle;
  std::vector<RankPart>& parts = files.parts;
  pickle.begin_dict();
  for (std::int64_t i = 0; i < options.virtual_stages; ++i) {
    const std::vector<RankPart> chunk = of_ranks.of_stage(i * options.pipeline + pp);
    pickle.text(options.virtual_stages == 1 ? "model" : "model" + std::to_string(i));
    write_tree(pickle, chunk, 0);
    parts.insert(parts.end(), chunk.begin(), chunk.end());
  }
  pickle.text("checkpoint_version").real(3.0).text("args");
  write_megatron_args(pickle, of_ranks.model(), of_ranks.padded_vocabulary(), parts.front().dtype, options,
                      run);
  if (run) {
    pickle.text("iteration").integer(run->counters().step).text("opt_param_scheduler");
    write_schedule(pickle, run->config(), run->counters());
    pickle.text("optimizer");
    if (options.distributed_optimizer) {
      write_optimizer_facts(pickle, *run, options, parts);
      files.buffers = plan_buffers(of_ranks, options, pp);
    } else {
      write_run_optimizer(pickle, *run, of_ranks.as_registered(parts), options, parts);
    }
  } else if (!options.distributed_optimizer) {
    write_optimizer(pickle);
  }
  pickle.end_dict();
  return files;
}

void write_rank(const fs::path& folder, RankParts& of_ranks, const MegatronExportOptions& options,
                const StageFiles& files, std::int64_t tp) {
  const bool apart = options.distributed_optimizer && !of_ranks.run();  // as in 2022 and 2023
  const char* name = apart ? "model_rng.pt" : "model_optim_rng.pt";
  write_torch_file(folder / name, files.pickle,
                   [&](std::size_t i, const auto& append) { of_ranks.write(files.parts[i], tp, append); });
  if (files.buffers) write_buffers(folder / "distrib_optim.pt", of_ranks, *files.buffers, tp);
}

/// The files of all ranks, in the folder of an iteration.
void write_ranks(const fs::path& iteration, RankParts& of_ranks, const MegatronExportOptions& options,
                 const std::vector<StageFiles>& stages) {
  for (std::int64_t tp = 0; tp < options.tensor; ++tp) {
    for (std::int64_t pp = 0; pp < options.pipeline; ++pp) {
      const fs::path own =
          iteration / rank_folder(tp, options.pipeline > 1 ? std::optional(pp) : std::nullopt);
      fs::create_directories(own);
      write_rank(own, of_ranks, options, stages[static_cast<std::size_t>(pp)], tp);
      const bool shards = options.distributed_optimizer && !of_ranks.run();
      for (std::int64_t dp = 0; shards && dp < options.data; ++dp) {
        TorchPickle pickle;
        pickle.begin_dict();
        write_optimizer(pickle);
        pickle.end_dict();
        const fs::path shard = own.string() + "_" + zero_filled(dp, 3);
        fs::create_directories(shard);
        write_torch_file(shard / "optim.pt", std::move(pickle), [](std::size_t, const auto&) {});
      }
    }
  }
}

/// `run`: what goes along with the weights; null: nothing.
void write_checkpoint(const fs::path& out, const Architecture& config, const WeightSource& weights,
                      const MegatronExportOptions& options, const RunSource* run) {
  require_unused(out);
  check_model(config.model, options);
  check_layout(config.model, options);
  const bool whole = options.format == MegatronExportOptions::Format::torch_dist;
  const MegatronExportOptions laid_out = whole ? undivided(options) : options;
  RankParts parts(config, weights, laid_out, run);
  std::vector<StageFiles> stages;
  std::uint64_t bytes = whole ? megatron_dist_bytes(parts, options) : 0;
  for (std::int64_t pp = 0; !whole && pp < options.pipeline; ++pp) {
    stages.push_back(plan_stage(parts, options, pp));
    bytes += stages.back().bytes() * static_cast<std::uint64_t>(options.tensor);
  }
  require_room_for(out, bytes);
  StagedDirectory folder(out, Existing::refuse);
  const fs::path iteration =
      folder.path() / (run ? "iter_" + zero_filled(run->counters().step, 7) : "release");
  fs::create_directories(iteration);
  if (whole) {
    write_megatron_dist(iteration, parts, options);
  } else {
    write_ranks(iteration, parts, options, stages);
  }
  write_text(folder.path() / "latest_checkpointed_iteration.txt",
             run ? std::to_string(run->counters().step) : "release");
  // Read back what will be trusted later.
  std::vector<std::string> notes;
  if (run) {
    open_megatron_run(folder.path(), {}, notes);
  } else {
    open_megatron(folder.path());
  }
  folder.publish();
}

/// The main weights of a run.
class RunWeights final : public WeightSource {
 public:
  explicit RunWeights(const RunSource& run) : run_(run) {}
  std::vector<TensorSpec> tensors() const override { return run_.parameters(); }
  void read(const std::string& name, std::span<std::byte> out) const override {
    run_.read(RunValue::weight, name, {reinterpret_cast<float*>(out.data()), out.size() / sizeof(float)});
  }

 private:
  const RunSource& run_;
};

}  // namespace

void export_megatron(const fs::path& out, const Architecture& config, const WeightSource& weights,
                     const MegatronExportOptions& options) {
  write_checkpoint(out, config, weights, options, nullptr);
}

void export_megatron_run(const fs::path& out, const RunSource& run, const MegatronExportOptions& given) {
  const Config& config = run.config();
  TESSERA_ENSURE(ConfigError, !given.dtype, "a run is written in its own precision");
  TESSERA_ENSURE(
      ConfigError, config.optimizer.no_decay.empty(),
      "optimizer.no_decay names parameters without weight decay; Megatron's groups are by their shape");
  TESSERA_ENSURE(ConfigError, !given.torch_adam || !given.distributed_optimizer,
                 "the distributed optimizer's state is the same for PyTorch's Adam and fused ones");
  TESSERA_ENSURE(ConfigError, run.counters().step > 0, "a run at step 0 has no optimizer's state");
  MegatronExportOptions options = given;
  options.dtype = dtype_of_precision(config.training.precision);
  write_checkpoint(out, architecture_of(config.model), RunWeights(run), options, &run);
}

}  // namespace tessera
