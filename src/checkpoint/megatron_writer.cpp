#include <algorithm>

#include "checkpoint/file_io.hpp"
#include "checkpoint/megatron_args.hpp"
#include "checkpoint/megatron_names.hpp"
#include "checkpoint/torch_file.hpp"
#include "tessera/base/families.hpp"
#include "tessera/checkpoint/megatron.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

constexpr const char* kHead = "output_layer.weight";

/// What Megatron's GPT model can be.
void check_model(const ModelConfig& m) {
  TESSERA_ENSURE(
      ConfigError, std::string_view(spec_of(m.family).body) != "t5",
      "T5 of Transformers is another model than Megatron's T5: its attention adds a bias by relative "
      "position, its norms take no mean and its layers have no biases; Megatron cannot hold it");
  const char* fault = nullptr;
  if (std::string_view(spec_of(m.family).body) != "decoder") fault = "is an encoder; decoders are written";
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
  TESSERA_ENSURE(ConfigError, fault == nullptr, "this model ", fault, ", which Megatron's GPT model has not");
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

/// A tensor of one rank's file.
struct Part {
  std::string ours;               ///< of the whole model
  std::vector<std::string> path;  ///< keys below `model`
  Shape shape;
  DType dtype;
};

/// Keys in one nest of dictionaries, in the order of their first appearance.
void write_tree(TorchPickle& pickle, std::span<const Part> parts, std::size_t depth) {
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
  Writer(const Architecture& config, const WeightSource& weights, const MegatronExportOptions& options)
      : model_(config.model), weights_(weights), options_(options) {
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
    std::vector<Part> parts;  // of all chunks
    TorchPickle pickle;
    pickle.begin_dict();
    for (std::int64_t i = 0; i < options_.virtual_stages; ++i) {
      const std::vector<Part> chunk = parts_of(i * options_.pipeline + pp);
      pickle.text(options_.virtual_stages == 1 ? "model" : "model" + std::to_string(i));
      write_tree(pickle, chunk, 0);
      parts.insert(parts.end(), chunk.begin(), chunk.end());
    }
    pickle.text("checkpoint_version").real(3.0).text("args");
    write_megatron_args(pickle, model_, padded_, parts.front().dtype, options_);
    if (!options_.distributed_optimizer) write_optimizer(pickle);
    pickle.end_dict();
    const char* name = options_.distributed_optimizer ? "model_rng.pt" : "model_optim_rng.pt";
    write_torch_file(folder / name, std::move(pickle), [&](std::size_t i, const auto& append) {
      const std::vector<std::byte> bytes = part_of_rank(parts[i], tp);
      append(std::span<const std::byte>(bytes));
    });
  }

 private:
  /// The tensors of a stage, counted in the order in which the model runs through ranks' virtual stages;
  /// those of one dictionary beside each other.
  std::vector<Part> parts_of(std::int64_t stage) const {
    const std::int64_t stages = options_.pipeline * options_.virtual_stages;
    const std::int64_t layers = model_.num_layers / stages, first = stage * layers;
    const bool is_first = stage == 0, is_last = stage + 1 == stages;
    std::vector<Part> parts;
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
      parts.push_back({spec.name, std::move(path), shape, options_.dtype.value_or(spec.dtype)});
    };
    for (const std::size_t i : order_) {
      const TensorSpec& spec = specs_[i];
      LayerName name = layer_name(spec.name);
      const bool head = spec.name == kHead, end = head || spec.name.starts_with("decoder.final_");
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
    return parts;
  }

  std::vector<std::byte> read(const std::string& name, DType dtype) const {
    const auto it =
        std::find_if(specs_.begin(), specs_.end(), [&](const TensorSpec& s) { return s.name == name; });
    std::vector<std::byte> bytes(it->bytes());
    weights_.read(name, bytes);
    if (dtype == it->dtype) return bytes;
    std::vector<std::byte> converted(static_cast<std::size_t>(it->shape.numel()) * size_of(dtype));
    convert_floats(it->dtype, bytes, dtype, converted);
    return converted;
  }

  std::vector<std::byte> part_of_rank(const Part& part, std::int64_t rank) const {
    const std::vector<std::byte> whole = read(part.ours, part.dtype);
    std::vector<std::byte> out(static_cast<std::size_t>(part.shape.numel()) * size_of(part.dtype));
    switch (tensor_split(part.ours)) {
      case TensorSplit::none:
        return whole;
      case TensorSplit::vocabulary:
        take_vocabulary(whole, part, rank, out);
        break;
      case TensorSplit::columns:
        take_columns(whole, rank, static_cast<std::size_t>(part.shape[1]) * size_of(part.dtype), out);
        break;
      case TensorSplit::gate_up:
        take_rows(whole, rank, model_.activation == MlpActivation::swiglu ? 2 : 1, out);
        break;
      case TensorSplit::query_key_value:
        take_query_key_value(whole, rank, part.shape[0], out);
        break;
    }
    return out;
  }

  void take_vocabulary(std::span<const std::byte> whole, const Part& part, std::int64_t rank,
                       std::span<std::byte> out) const {
    const std::size_t row = static_cast<std::size_t>(part.shape[1]) * size_of(part.dtype);
    for (std::int64_t i = 0; i < part.shape[0]; ++i) {
      const std::int64_t from = std::min(rank * part.shape[0] + i, model_.vocab_size - 1);
      std::copy_n(whole.data() + static_cast<std::size_t>(from) * row, row,
                  out.data() + static_cast<std::size_t>(i) * row);
    }
  }
  static void take_columns(std::span<const std::byte> whole, std::int64_t rank, std::size_t part,
                           std::span<std::byte> out) {
    const std::size_t rows = out.size() / part, row = whole.size() / rows;
    for (std::size_t i = 0; i < rows; ++i)
      std::copy_n(whole.data() + i * row + static_cast<std::size_t>(rank) * part, part,
                  out.data() + i * part);
  }
  static void take_rows(std::span<const std::byte> whole, std::int64_t rank, std::size_t halves,
                        std::span<std::byte> out) {
    const std::size_t block = out.size() / halves;
    for (std::size_t half = 0; half < halves; ++half)
      std::copy_n(whole.data() + half * (whole.size() / halves) + static_cast<std::size_t>(rank) * block,
                  block, out.data() + half * block);
  }
  /// By group of heads: its queries, its key, its value.
  void take_query_key_value(std::span<const std::byte> whole, std::int64_t rank, std::int64_t rows,
                            std::span<std::byte> out) const {
    const std::int64_t all = rows * options_.tensor, heads = all / model_.head_dim,
                       own = heads / options_.tensor;
    const std::size_t head_bytes = whole.size() / static_cast<std::size_t>(heads);
    const HfPart grouped{"", Shape{all}, false, model_.num_kv_heads, model_.head_dim};
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t place = stored_row(grouped, head * model_.head_dim) / model_.head_dim - rank * own;
      if (place < 0 || place >= own) continue;
      std::copy_n(whole.data() + static_cast<std::size_t>(head) * head_bytes, head_bytes,
                  out.data() + static_cast<std::size_t>(place) * head_bytes);
    }
  }

  const ModelConfig& model_;
  const WeightSource& weights_;
  const MegatronExportOptions& options_;
  std::int64_t padded_ = 0;
  std::vector<TensorSpec> specs_;
  std::vector<std::size_t> order_;  ///< of specs_, as the model runs
};

}  // namespace

void export_megatron(const fs::path& out, const Architecture& config, const WeightSource& weights,
                     const MegatronExportOptions& options) {
  require_unused(out);
  check_model(config.model);
  check_layout(config.model, options);
  const Writer writer(config, weights, options);
  StagedDirectory folder(out, Existing::refuse);
  for (std::int64_t tp = 0; tp < options.tensor; ++tp) {
    for (std::int64_t pp = 0; pp < options.pipeline; ++pp) {
      const std::string name = rank_folder(tp, options.pipeline > 1 ? std::optional(pp) : std::nullopt);
      const fs::path own = folder.path() / "release" / name;
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
  write_text(folder.path() / "latest_checkpointed_iteration.txt", "release");
  open_megatron(folder.path());  // read back what will be trusted later
  folder.publish();
}

}  // namespace tessera
