/// BERT: an encoder of tokens and segments with a head for masked tokens and one for pairs of sentences.

#include "nn/models/bert.hpp"

#include "nn/models/norm_options.hpp"
#include "nn/own_positions.hpp"
#include "tessera/base/config.hpp"
#include "tessera/base/model_math.hpp"
#include "tessera/nn/models/decoder.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace nn {
namespace {

/// Tables of tokens, positions and segments, added up.
class BertFront : public Block {
 public:
  struct Options {
    Numerics numerics = {};
    TensorParallel tensor = {};
    bool tied = false;  ///< another stage has a copy of the token table
    bool norm = false;
  };
  BertFront(std::string name, const ModelConfig& config, const Options& options)
      : Block(std::move(name)),
        tensor_(options.tensor),
        residual_(options.numerics.residual),
        dropout_(embedding_dropout(config)),
        embedding_(submodule<Embedding>("embedding",
                                        Embedding::Options{.vocab_size = config.vocab_size,
                                                           .size = config.hidden_size,
                                                           .max_positions = config.max_positions,
                                                           .std = config.init_std,
                                                           .out = options.numerics.residual,
                                                           .tensor = options.tensor,
                                                           .tied = options.tied,
                                                           .padding_id = config.padding_id.value_or(-1)})),
        types_(parameter("embedding.token_type_embeddings.weight",
                         Shape{*config.token_types, config.hidden_size},
                         Init::normal(static_cast<float>(config.init_std)),
                         {.reads_main = true, .partial_over_tensor = options.tensor.sharded_sequence()})),
        norm_(options.norm ? &submodule<Norm>("embedding.norm",
                                              norm_options(config, options.tensor, options.numerics.residual))
                           : nullptr) {}

  Flow forward(const Forward& f, Flow) override {
    const Tensor types = own_types(f);
    const Var segments = embedding(f.exec, f.tape ? f.tape->input(types, false) : Var(types), types_, {},
                                   nullptr, {residual_});
    Var x = add(f.exec, embedding_.forward(f), segments);
    if (norm_ != nullptr) x = norm_->forward(f, x, {}).y;  // in the stream's dtype
    return {dropout(f.exec, x, on_own_positions(f, tensor_).dropout(embedding_.name(), dropout_)), {}, {}};
  }
  bool reads_weights_in_backward() const override { return norm_ != nullptr; }
  Parameter& table() { return embedding_.table(); }

 private:
  /// Of this rank's positions.
  Tensor own_types(const Forward& f) const {
    Tensor types = f.input.token_types;
    if (!types) {
      types = Tensor::empty(f.exec, {f.input.seq_length, f.input.batch}, DType::i32);
      ops::fill_zero(f.exec, types);
    }
    if (!tensor_.sharded_sequence()) return types;
    const std::int64_t count = f.input.seq_length / tensor_.size();
    return types.narrow(0, tensor_.rank() * count, count);
  }

  TensorParallel tensor_;
  DType residual_;
  double dropout_;
  Embedding& embedding_;
  Parameter& types_;
  Norm* norm_;
};

/// A layer whose residual stream is normalised behind each branch.
class BertLayer : public Block {
 public:
  struct Options {
    Numerics numerics = {};
    TensorParallel tensor = {};
    bool forget_norms = false;  ///< selective recomputation
  };
  BertLayer(std::string name, const ModelConfig& config, std::int64_t layer, const Options& options)
      : Block(std::move(name)),
        compute_(options.numerics.compute),
        dropout_(config.dropout),
        attention_(submodule<SelfAttention>("self_attention", config, layer, options.tensor, false)),
        attention_norm_(submodule<Norm>(
            "post_attention_layernorm",
            norm_options(config, options.tensor, options.numerics.residual, options.forget_norms))),
        mlp_(submodule<Mlp>("mlp", config, options.tensor)),
        mlp_norm_(submodule<Norm>(
            "post_mlp_layernorm",
            norm_options(config, options.tensor, options.numerics.residual, options.forget_norms))) {}

  Flow forward(const Forward& f, Flow flow) override {
    const Var& x = flow.residual;
    // A norm takes its branch in the dtype of its result, which is the stream's here.
    const DType stream = x.value().dtype();
    const Var attended = cast(f.exec, attention_.forward(f, cast(f.exec, x, compute_), nullptr, {}), stream);
    const Var mid = attention_norm_.forward(f, x, attended, f.dropout(attention_.name(), dropout_)).y;
    const Var branch = cast(f.exec, mlp_.forward(f, cast(f.exec, mid, compute_)), stream);
    return {mlp_norm_.forward(f, mid, branch, f.dropout(mlp_.name(), dropout_)).y, {}, {}};
  }

 private:
  DType compute_;
  double dropout_;
  SelfAttention& attention_;
  Norm& attention_norm_;
  Mlp& mlp_;
  Norm& mlp_norm_;
};

/// What heads of BERT have in common: the norm behind the last layer, and the pooled first position.
class PooledHead : public Head {
 public:
  struct Options {
    DType compute = DType::f32;
    TensorParallel tensor = {};
    Parameter* table = nullptr;  ///< of the embedding, where it is on this rank and the head reads it
    bool final_norm = false;
  };

 protected:
  PooledHead(std::string name, const ModelConfig& config, const Options& options)
      : Head(std::move(name)),
        compute_(options.compute),
        tensor_(options.tensor),
        final_norm_(options.final_norm
                        ? &submodule<Norm>("decoder.final_layernorm",
                                           norm_options(config, options.tensor, options.compute))
                        : nullptr) {}

  static Linear::Options square(const ModelConfig& config, bool sequence_parallel) {
    return {.in = config.hidden_size,
            .out = config.hidden_size,
            .std = config.init_std,
            .sequence_parallel = sequence_parallel};
  }
  /// The pooler, and what turns its result into logits of `classes` classes.
  void add_classes(const ModelConfig& config, const char* name, std::int64_t classes) {
    pooler_ = &submodule<Linear>("pooler.dense", square(config, false));
    Linear::Options options = square(config, false);
    options.out = classes;
    classes_ = &submodule<Linear>(name, options);
  }
  /// What the last layer leaves.
  Var hidden(const Forward& f, const Flow& flow) {
    return final_norm_ ? final_norm_->forward(f, flow.residual, flow.branch, flow.dropout).y
                       : cast(f.exec, flow.residual, compute_);
  }
  /// Logits of samples, [batch, classes].
  Var classes(const Forward& f, const Var& hidden, double drop) {
    const Var first = pooler_->forward(f, first_position(f.exec, tensor_, hidden));
    const Var pooled = activation(f.exec, first, ops::ActivationKind::tanh);
    return classes_->forward(f, dropout(f.exec, pooled, f.dropout("pooler", drop, 1)));
  }

  DType compute_;
  TensorParallel tensor_;
  Norm* final_norm_;
  Linear *pooler_ = nullptr, *classes_ = nullptr;
};

/// Of num_labels outputs, what Transformers makes of them where nothing is said.
bool tells_classes_apart(const ModelConfig& config) {
  const ProblemType by_number =
      *config.num_labels > 1 ? ProblemType::single_label_classification : ProblemType::regression;
  return config.problem_type.value_or(by_number) == ProblemType::single_label_classification;
}

/// The class of a sample, by its pooled first position, or numbers whose loss the caller makes.
class BertClassifier : public PooledHead {
 public:
  BertClassifier(std::string name, const ModelConfig& config, const Options& options)
      : PooledHead(std::move(name), config, options),
        dropout_(config.dropout),
        has_loss_(tells_classes_apart(config)) {
    add_classes(config, "classifier", *config.num_labels);
  }

  Var forward(const Forward& f, const Flow& flow, Model::Output output, const Tensor&) override {
    const Var logits = classes(f, hidden(f, flow), dropout_);
    if (output != Model::Output::losses) return logits;
    const bool planned = f.exec.device().is_meta();  // nobody sees its numbers
    TESSERA_CHECK(
        has_loss_ || planned,
        "the loss of a regression or of several labels a sample is the caller's: take the logits of "
        "Engine::forward() and give backward() their gradient");
    return cross_entropy(f.exec, logits, f.input.sample_labels);
  }

 private:
  double dropout_;
  bool has_loss_;
};

/// Masked tokens by a transform and the token table; whether one segment follows the other by the pooled
/// first position.
class BertHead : public PooledHead {
 public:
  BertHead(std::string name, const ModelConfig& config, const Options& options)
      : PooledHead(std::move(name), config, options),
        activation_(activation_kind(config.activation)),
        transform_(submodule<Linear>("lm_head.dense", square(config, options.tensor.sharded_sequence()))),
        norm_(submodule<Norm>("lm_head.layernorm", norm_options(config, options.tensor, options.compute))),
        bias_(parameter("lm_head.bias", rows(Shape{config.vocab_size}), Init::zeros())),
        table_(options.table),
        weight_(table_ != nullptr ? *table_
                                  : parameter("embedding.word_embeddings.weight",
                                              rows(Shape{config.vocab_size, config.hidden_size}),
                                              Init::normal(static_cast<float>(config.init_std)),
                                              {.reads_main = true, .tied = true, .counted = false})) {
    if (*config.binary_head) add_classes(config, "binary_head", 2);
  }

  Var forward(const Forward& f, const Flow& flow, Model::Output output, const Tensor& upstream) override {
    const ExecCtx& ctx = f.exec;
    const Var last = hidden(f, flow);
    if (output == Model::Output::sample_logits) return classes(f, last, 0);
    if (classes_ != nullptr && f.losses != nullptr)
      f.add_loss("nsp", cross_entropy(ctx, classes(f, last, 0), f.input.sample_labels));
    const Var turned = activation(ctx, transform_.forward(f, last), activation_);
    const Var x = norm_.forward(f, turned, {}).y;
    if (output == Model::Output::losses)
      return vocab_linear_cross_entropy(ctx, tensor_, x, weight_, f.input.labels, upstream, &bias_, 0.0f,
                                        f.input.labelled);
    return vocab_logits(ctx, tensor_, x, weight_, &bias_);
  }
  const Parameter* borrowed() const override { return table_; }

 private:
  Placement rows(const Shape& shape) const {
    return Placement::split(shape, 0, tensor_.rank(), tensor_.size());
  }

  ops::ActivationKind activation_;
  Linear& transform_;
  Norm& norm_;
  Parameter& bias_;
  Parameter* table_;
  Parameter& weight_;
};

}  // namespace
}  // namespace nn

namespace {

class Bert : public Stack {
 public:
  Bert(const ModelConfig& config, const Numerics& numerics, const Sharding& given, bool norms_first)
      : Stack(config.hidden_size, config.num_layers, numerics, given),
        config_(config),
        positions_(config_),
        norms_first_(norms_first) {
    check();
    for (const ModelPiece& piece : sharding().pieces) add_piece(piece);
  }

  std::int64_t vocab_size() const override { return config_.vocab_size; }
  std::int64_t max_positions() const override { return config_.max_positions; }
  std::int64_t token_types() const override { return *config_.token_types; }
  bool is_repeatable() const override { return true; }
  std::int64_t sample_classes() const override {
    return config_.num_labels.value_or(*config_.binary_head ? 2 : 0);
  }
  bool reads_whole_samples() const override { return config_.num_labels.has_value(); }
  std::vector<ExtraLossSpec> extra_losses() const override {
    if (!*config_.binary_head) return {};
    return {{.name = "nsp", .weight = 1.0, .per = LossCount::sample_targets}};
  }
  double flops_per_token(const SampleLengths& lengths) const override {
    const double whole = tessera::flops_per_token(config_, lengths.tokens, FlopConvention::palm);
    const auto vocabulary = static_cast<double>(config_.vocab_size * config_.hidden_size);
    return reads_whole_samples() ? whole - 6 * vocabulary : whole;
  }
  void check_generates(std::int64_t) const override {
    throw InvalidArgument("text is generated by models that look back only; BERT looks to both sides");
  }

 private:
  void check() const {
    const auto need = [](bool holds, const char* what) {
      TESSERA_ENSURE(ConfigError, holds, "a BERT ", what);
    };
    need(config_.position_embedding == PositionKind::learned, "has learned positions");
    need(config_.tied_head, "has a head tied to its embedding");
    need(!is_gated(config_.activation), "has no gate in its MLP");
    need(!config_.parallel_residual, "has its attention and MLP one after the other");
    need(config_.token_types.value_or(0) > 0, "has model.token_types above 0");
    need(!config_.num_labels || !*config_.binary_head,
         "classifies samples (model.num_labels) or pairs of segments (model.binary_head), not both");
    TESSERA_ENSURE(ConfigError, config_.vocab_size >= sharding().tensor.size(), "model.vocab_size (",
                   config_.vocab_size, ") is less than parallel.tensor (", sharding().tensor.size(), ")");
  }

  void add_piece(const ModelPiece& piece) {
    begin_piece();
    if (piece.embedding)
      front_ = &add_front<nn::BertFront>("", config_,
                                         nn::BertFront::Options{.numerics = numerics(),
                                                                .tensor = sharding().tensor,
                                                                .tied = !holds_head() && !config_.num_labels,
                                                                .norm = !norms_first_});
    for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i)
      add_one_layer("decoder.layers." + std::to_string(i), i);
    if (!piece.head) return;
    nn::BertHead::Options options{
        .compute = numerics().compute, .tensor = sharding().tensor, .final_norm = norms_first_};
    if (config_.num_labels) {
      add_head<nn::BertClassifier>("", config_, options);
      return;
    }
    options.table = front_ ? &front_->table() : nullptr;
    add_head<nn::BertHead>("", config_, options);
  }

  void add_one_layer(const std::string& name, std::int64_t i) {
    const bool forget = sharding().recompute.what == Recompute::selective;
    if (norms_first_) {
      add_layer<nn::DecoderLayer>(name, config_, i, positions_,
                                  nn::DecoderLayer::Options{.compute = numerics().compute,
                                                            .tensor = sharding().tensor,
                                                            .forget_norms = forget,
                                                            .causal = false});
    } else {
      add_layer<nn::BertLayer>(
          name, config_, i,
          nn::BertLayer::Options{
              .numerics = numerics(), .tensor = sharding().tensor, .forget_norms = forget});
    }
  }

  ModelConfig config_;
  nn::PositionTables positions_;
  bool norms_first_;
  nn::BertFront* front_ = nullptr;
};

}  // namespace

std::unique_ptr<Model> build_bert(const ModelConfig& config, const Numerics& numerics,
                                  const Sharding& sharding) {
  return std::make_unique<Bert>(config, numerics, sharding, false);
}

std::unique_ptr<Model> build_megatron_bert(const ModelConfig& config, const Numerics& numerics,
                                           const Sharding& sharding) {
  return std::make_unique<Bert>(config, numerics, sharding, true);
}

}  // namespace tessera
