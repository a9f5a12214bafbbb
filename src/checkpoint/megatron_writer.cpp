#include <algorithm>
#include <array>

#include "checkpoint/file_io.hpp"
#include "checkpoint/megatron_args.hpp"
#include "checkpoint/megatron_names.hpp"
#include "checkpoint/megatron_slices.hpp"
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

constexpr const char* kHead = "output_layer.weight";
/// How names of what the last stage has begin.
constexpr std::array kEnd = {"decoder.final_", "pooler.", "lm_head.", "binary_head."};

bool is_bert(const ModelConfig& m) { return std::string_view(spec_of(m.family).body) == "megatron-bert"; }

/// What Megatron's GPT and BERT models can be.
void check_model(const ModelConfig& m, MegatronExportOptions::Names names) {
  TESSERA_ENSURE(
      ConfigError, std::string_view(spec_of(m.family).body) != "t5",
      "T5 of Transformers is another model than Megatron's T5: its attention adds a bias by relative "
      "position, its norms take no mean and its layers have no biases; Megatron cannot hold it");
  const char* fault = nullptr;
  if (std::string_view(spec_of(m.family).body) != "decoder" && !is_bert(m))
    fault = "is an encoder with its norms behind each branch";
  if (m.num_labels) fault = "has a head for classes of samples";
  if (is_bert(m) && is_gated(*m.activation)) fault = "is an encoder with a gate";
  if (m.position_embedding == PositionKind::alibi) fault = "has ALiBi positions";
  if (m.parallel_residual.value_or(false)) fault = "has attention and MLP side by side";
  if (m.sliding_window) fault = "has a window";
  if (m.activation == MlpActivation::relu || m.activation == MlpActivation::geglu)
    fault = "has another activation";
  if (m.qk_norm == QkNorm::head) fault = "norms queries and keys";
  if (m.norm_placement != NormPlacement::pre || m.norm_zero_centered.value_or(false) ||
      m.embedding_norm.value_or(false) || has_norm_bias(m) != (m.norm == NormStyle::layernorm))
    fault = "has other norms";
  if (m.embedding_scaled.value_or(false) || m.attention_scale || m.attention_softcap.value_or(0) > 0 ||
      m.logit_softcap.value_or(0) > 0)
    fault = "scales or caps embeddings, scores or logits";
  if (m.rope_scaling != RopeScaling{}) fault = "has scaled rotary positions";
  if (m.norm == NormStyle::rmsnorm && *m.linear_bias) fault = "has RMSNorm and biases";
  if (m.proj_bias && *m.proj_bias != *m.linear_bias) fault = "has a bias of the output projection of its own";
  if (*m.linear_bias && !*m.qkv_bias) fault = "has biases, but none of query, key and value";
  TESSERA_ENSURE(ConfigError, fault == nullptr, "this model ", fault, ", which Megatron's model has not");
  TESSERA_ENSURE(ConfigError, !is_bert(m) || names == MegatronExportOptions::Names::legacy,
                 "BERT is written with --names legacy");
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

class Writer {
 public:
  Writer(const Architecture& config, const WeightSource& weights, const MegatronExportOptions& options,
         const RunSource* run)
      : model_(config.model), weights_(weights), options_(options), run_(run) {
    const std::int64_t step = options.vocab_divisible_by * options.tensor;
    padded_ = (model_.vocab_size + step - 1) / step * step;
    for (TensorSpec& spec : weights.tensors()) specs_.push_back(std::move(spec));
    const std::vector<TensorSpec> wanted = parameter_specs(config);
    for (const TensorSpec& each : wanted) {
      const auto it = std::find_if(specs_.begin(), specs_.end(),
                                   [&](const TensorSpec& s) { return s.name == each.name; });
      TESSERA_CHECK(it != specs_.end() && it->shape == each.shape,
                    "the weights do not fit the model's configuration: ", each.name, " ", each.shape,
                    " is missing or of another shape");
      order_.push_back(static_cast<std::size_t>(it - specs_.begin()));
    }
    TESSERA_CHECK_EQ(wanted.size(), specs_.size(), "tensors of the model");
  }

  void write(const fs::path& folder, std::int64_t tp, std::int64_t pp) const {
    std::vector<RankPart> parts;  // of all chunks
    TorchPickle pickle;
    pickle.begin_dict();
    for (std::int64_t i = 0; i < options_.virtual_stages; ++i) {
      const std::vector<RankPart> chunk = parts_of(i * options_.pipeline + pp);
      pickle.text(options_.virtual_stages == 1 ? "model" : "model" + std::to_string(i));
      write_tree(pickle, chunk, 0);
      parts.insert(parts.end(), chunk.begin(), chunk.end());
    }
    pickle.text("checkpoint_version").real(3.0).text("args");
    write_megatron_args(pickle, model_, padded_, parts.front().dtype, options_, run_);
    if (run_) {
      pickle.text("iteration").integer(run_->counters().step).text("opt_param_scheduler");
      write_schedule(pickle, run_->config(), run_->counters());
      pickle.text("optimizer");
      write_run_optimizer(pickle, *run_, as_registered(parts), parts);
    } else if (!options_.distributed_optimizer) {
      write_optimizer(pickle);
    }
    pickle.end_dict();
    const char* name = options_.distributed_optimizer ? "model_rng.pt" : "model_optim_rng.pt";
    write_torch_file(folder / name, std::move(pickle), [&](std::size_t i, const auto& append) {
      const std::vector<std::byte> bytes = part_of_rank(parts[i], tp);
      append(std::span<const std::byte>(bytes));
    });
  }

 private:
  /// What a rank's optimizer has, in its model's order: the copy of a tied embedding is a parameter where
  /// another stage has the embedding, and comes before the head for masked tokens.
  std::vector<RankPart> as_registered(std::vector<RankPart> parts) const {
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

  /// Of a legacy BERT: one dictionary after the other, a module's own parameters before those of its modules.
  static int place_in_bert(const std::vector<std::string>& path) {
    if (path[0] == "language_model") return 0;
    if (path[0] == "lm_head") return path[1] == "bias" ? 1 : 2;
    return path[0] == "binary_head" ? 3 : 4;
  }

  /// Megatron Core registers an attention's output projection before the one of its input.
  static void order_as_core(std::vector<RankPart>& parts) {
    const auto holds = [](const RankPart& each, const char* module) {
      return each.path[0].find(module) != std::string::npos;
    };
    for (std::size_t i = 0; i < parts.size(); ++i) {
      for (std::size_t j = i; j > 0 && holds(parts[j], "self_attention.linear_proj.") &&
                              holds(parts[j - 1], "self_attention.linear_qkv.");
           --j)
        std::swap(parts[j], parts[j - 1]);
    }
  }

  /// The tensors of a stage, counted in the order in which the model runs through ranks' virtual stages;
  /// those of one dictionary beside each other.
  std::vector<RankPart> parts_of(std::int64_t stage) const {
    const std::int64_t stages = options_.pipeline * options_.virtual_stages;
    const std::int64_t layers = model_.num_layers / stages, first = stage * layers;
    const bool is_first = stage == 0, is_last = stage + 1 == stages;
    std::vector<RankPart> parts;
    const auto add = [&](const TensorSpec& spec, std::vector<std::string> path) {
      Shape shape = spec.shape;
      switch (tensor_split(spec.name)) {
        case TensorSplit::vocabulary:
          shape[0] = padded_ / options_.tensor;
          break;
        case TensorSplit::query_key_value:
        case TensorSplit::gate_up:
          shape[0] /= options_.tensor;
          break;
        case TensorSplit::columns:
          shape[1] /= options_.tensor;
          break;
        case TensorSplit::none:
          break;
      }
      parts.push_back({spec.name, std::move(path), shape, options_.dtype.value_or(spec.dtype), std::nullopt});
    };
    for (const std::size_t i : order_) {
      const TensorSpec& spec = specs_[i];
      LayerName name = layer_name(spec.name);
      const bool end = spec.name == kHead || std::ranges::any_of(kEnd, [&](const char* begin) {
                         return spec.name.starts_with(begin);
                       });
      const bool here = name.layer >= 0 ? name.layer >= first && name.layer < first + layers
                        : end           ? is_last
                                        : is_first;
      if (!here) continue;
      if (name.layer >= 0) name.layer -= first;
      add(spec, megatron_path(options_.names, name));
    }
    // Megatron's model and the converter of Transformers look for the tied head of the last stage here.
    const bool legacy = options_.names == MegatronExportOptions::Names::legacy;
    if (*model_.tied_head && is_last && (legacy || !is_first))
      add(specs_[order_.front()], legacy ? std::vector<std::string>{"word_embeddings_for_head", "weight"}
                                         : std::vector<std::string>{kHead});
    if (!legacy) order_as_core(parts);
    if (is_bert(model_))
      std::ranges::stable_sort(parts, {}, [](const RankPart& each) { return place_in_bert(each.path); });
    return parts;
  }

  std::vector<std::byte> read(const RankPart& part) const {
    if (part.value) {
      std::vector<float> values(static_cast<std::size_t>(spec_of(part.ours).shape.numel()));
      run_->read(*part.value, part.ours, values);
      const auto bytes = std::as_bytes(std::span<const float>(values));
      return {bytes.begin(), bytes.end()};
    }
    const TensorSpec& spec = spec_of(part.ours);
    std::vector<std::byte> bytes(spec.bytes());
    weights_.read(spec.name, bytes);
    if (part.dtype == spec.dtype) return bytes;
    std::vector<std::byte> converted(static_cast<std::size_t>(spec.shape.numel()) * size_of(part.dtype));
    convert_floats(spec.dtype, bytes, part.dtype, converted);
    return converted;
  }
  std::vector<std::byte> loss_scale() const {
    const auto scale = static_cast<float>(run_->counters().loss_scale);
    const auto bytes = std::as_bytes(std::span(&scale, 1));
    return {bytes.begin(), bytes.end()};
  }
  const TensorSpec& spec_of(const std::string& name) const {
    return *std::find_if(specs_.begin(), specs_.end(), [&](const TensorSpec& s) { return s.name == name; });
  }

  std::vector<std::byte> part_of_rank(const RankPart& part, std::int64_t rank) const {
    if (part.ours.empty()) return loss_scale();
    std::vector<std::byte> whole = read(part);
    if (tensor_split(part.ours) == TensorSplit::none) return whole;
    const bool moments = part.value && *part.value != RunValue::weight;
    std::vector<std::byte> out(static_cast<std::size_t>(part.shape.numel()) * size_of(part.dtype));
    cut_rank({.model = model_, .ranks = options_.tensor, .rank = rank, .pad_with_last = !moments}, part,
             whole, out);
    return out;
  }

  const ModelConfig& model_;
  const WeightSource& weights_;
  const MegatronExportOptions& options_;
  const RunSource* run_;  ///< null: weights alone
  std::int64_t padded_ = 0;
  std::vector<TensorSpec> specs_;
  std::vector<std::size_t> order_;  ///< of specs_, as the model runs
};

}  // namespace

namespace {

/// `run`: what goes along with the weights; null: nothing.
void write_checkpoint(const fs::path& out, const Architecture& config, const WeightSource& weights,
                      const MegatronExportOptions& options, const RunSource* run) {
  require_unused(out);
  check_model(config.model, options.names);
  check_layout(config.model, options);
  const Writer writer(config, weights, options, run);
  StagedDirectory folder(out, Existing::refuse);
  const std::string iteration = run ? zero_filled(run->counters().step, 7) : "";
  for (std::int64_t tp = 0; tp < options.tensor; ++tp) {
    for (std::int64_t pp = 0; pp < options.pipeline; ++pp) {
      const std::string name = rank_folder(tp, options.pipeline > 1 ? std::optional(pp) : std::nullopt);
      const fs::path own = folder.path() / (run ? "iter_" + iteration : "release") / name;
      fs::create_directories(own);
      writer.write(own, tp, pp);
      for (std::int64_t dp = 0; options.distributed_optimizer && dp < options.data; ++dp) {
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
  TESSERA_ENSURE(ConfigError, !given.distributed_optimizer && !given.dtype,
                 "a run is written with its plain optimizer and in its own precision");
  TESSERA_ENSURE(
      ConfigError, config.optimizer.no_decay.empty(),
      "optimizer.no_decay names parameters without weight decay; Megatron's groups are by their shape");
  TESSERA_ENSURE(ConfigError, run.counters().step > 0, "a run at step 0 has no optimizer's state");
  MegatronExportOptions options = given;
  options.dtype = dtype_of_precision(config.training.precision);
  write_checkpoint(out, architecture_of(config.model), RunWeights(run), options, &run);
}

}  // namespace tessera
