#include "tessera/nn/models/decoder.hpp"

#include <algorithm>

#include "nn/models/norm_options.hpp"
#include "tessera/base/model_math.hpp"

namespace tessera {
namespace nn {
void PositionTables::make(const ExecCtx& ctx) {
  if (*config_.position_embedding == PositionKind::rotary && !rope_.cos)
    make_rope(ctx, config_.max_positions);
  if (*config_.position_embedding == PositionKind::alibi && !alibi_slopes_)
    alibi_slopes_ = Tensor::from(ctx, nn::alibi_slopes(config_.num_heads), {config_.num_heads});
}

std::int64_t PositionTables::reserve(const ExecCtx& ctx, std::int64_t positions, std::int64_t limit) {
  if (*config_.position_embedding != PositionKind::rotary) return 0;
  const std::int64_t have = rope_.cos ? rope_.cos.size(0) : 0;
  if (positions <= std::max(have, config_.max_positions)) return have;
  // Twice as many: ever longer samples make few tables.
  make_rope(ctx, std::min(2 * positions, limit));
  return rope_.cos.size(0);
}

void PositionTables::make_rope(const ExecCtx& ctx, std::int64_t positions) {
  const auto rotary =
      static_cast<std::int64_t>(static_cast<double>(config_.head_dim) * config_.rope_fraction) / 2 * 2;
  rope_ = ops::make_rope_table(ctx, positions, rotary, config_.rope_theta, config_.rope_scaling,
                               config_.rope_interleaved);
}

DecoderFront::DecoderFront(std::string name, const Embedding::Options& options)
    : Block(std::move(name)), embedding_(submodule<Embedding>("embedding", options)) {}

DecoderLayer::DecoderLayer(std::string name, const ModelConfig& config, std::int64_t layer,
                           const PositionTables& positions, const Options& options)
    : Block(std::move(name)),
      dropout_(config.dropout),
      parallel_(*config.parallel_residual),
      cache_{head_share(config, options.tensor).kv_heads, config.head_dim},
      positions_(positions),
      input_norm_(submodule<Norm>(
          "input_layernorm", norm_options(config, options.tensor, options.compute, options.forget_norms))),
      attention_(submodule<SelfAttention>("self_attention", config, layer, options.tensor, options.causal)),
      mlp_norm_(submodule<Norm>("pre_mlp_layernorm",
                                norm_options(config, options.tensor, options.compute, options.forget_norms))),
      mlp_(submodule<Mlp>("mlp", config, options.tensor)) {}

Flow DecoderLayer::forward(const Forward& forward, Flow flow) {
  const ResidualNorm in = input_norm_.forward(forward, flow.residual, flow.branch, flow.dropout);
  const Var attended = attention_.forward(forward, in.y, positions_.rope(), positions_.alibi_slopes());
  if (parallel_) {
    const Var own = mlp_norm_.forward(forward, in.residual, {}, {}).y;
    const Var residual =
        fold(forward.exec, {in.residual, attended, forward.dropout(attention_.name(), dropout_)});
    return {residual, mlp_.forward(forward, own), forward.dropout(mlp_.name(), dropout_)};
  }
  const ResidualNorm mid =
      mlp_norm_.forward(forward, in.residual, attended, forward.dropout(attention_.name(), dropout_));
  return {mid.residual, mlp_.forward(forward, mid.y), forward.dropout(mlp_.name(), dropout_)};
}

VocabHead::VocabHead(std::string name, const ModelConfig& config, const TensorParallel& tensor, DType compute,
                     Parameter* table)
    : Head(std::move(name)),
      tensor_(tensor),
      norm_(submodule<Norm>("decoder.final_layernorm", norm_options(config, tensor, compute))),
      table_(table),
      weight_(table != nullptr ? *table : declare_weight(config)) {}

Parameter& VocabHead::declare_weight(const ModelConfig& config) {
  const Placement rows =
      Placement::split({config.vocab_size, config.hidden_size}, 0, tensor_.rank(), tensor_.size());
  const Init init = Init::normal(static_cast<float>(config.init_std));
  if (!*config.tied_head) return parameter("output_layer.weight", rows, init);
  // A tied head whose embedding is on another stage is a copy of it under the same name, laid out alike.
  return parameter("embedding.word_embeddings.weight", rows, init,
                   {.reads_main = true, .tied = true, .counted = false});
}

Var VocabHead::forward(const Forward& forward, const Flow& flow, Model::Output output,
                       const Tensor& upstream) {
  const ExecCtx& ctx = forward.exec;
  const Var hidden = norm_.forward(forward, flow.residual, flow.branch, flow.dropout).y;
  if (output == Model::Output::losses)
    return vocab_linear_cross_entropy(ctx, tensor_, hidden, weight_, forward.input.labels, upstream);
  return vocab_logits(ctx, tensor_, hidden, weight_);
}

}  // namespace nn

namespace {

/// The rotary angle of a position is a product in fp32, which tells no more positions apart.
constexpr std::int64_t kMostComputedPositions = std::int64_t{1} << 24;

}  // namespace

Decoder::Decoder(const ModelConfig& config, const Numerics& numerics, const Sharding& given)
    : Stack(config.hidden_size, config.num_layers, numerics, given), config_(config), positions_(config_) {
  TESSERA_ENSURE(
      ConfigError, !config_.token_types && !config_.binary_head.value_or(false) && !config_.num_labels,
      "model.token_types, model.binary_head and model.num_labels are of bert and megatron-bert, not of ",
      config_.family.name);
  TESSERA_ENSURE(ConfigError, config_.position_embedding != PositionKind::relative && !config_.encoder_layers,
                 "relative positions and model.encoder_layers are of t5, not of ", config_.family.name);
  TESSERA_ENSURE(ConfigError, config_.vocab_size >= given.tensor.size(), "model.vocab_size (",
                 config_.vocab_size, ") is less than parallel.tensor (", given.tensor.size(), ")");
  for (const ModelPiece& piece : sharding().pieces) add_piece(piece);
}

nn::Embedding::Options Decoder::embedding_options() const {
  return {.vocab_size = config_.vocab_size,
          .size = config_.hidden_size,
          .max_positions = *config_.position_embedding == PositionKind::learned ? config_.max_positions : 0,
          .std = config_.init_std,
          .dropout = config_.embedding_dropout.value_or(config_.dropout),
          .out = numerics().residual,
          .tensor = sharding().tensor,
          .tied = *config_.tied_head && !holds_head(),
          .padding_id = config_.padding_id.value_or(-1)};
}

void Decoder::add_piece(const ModelPiece& piece) {
  begin_piece();
  // Front and head have no name of their own: those of their parameters are the model's.
  if (piece.embedding) front_ = &add_front<nn::DecoderFront>("", embedding_options());
  const nn::DecoderLayer::Options options{.compute = numerics().compute,
                                          .tensor = sharding().tensor,
                                          .forget_norms = sharding().recompute.what == Recompute::selective};
  for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i)
    add_layer<nn::DecoderLayer>("decoder.layers." + std::to_string(i), config_, i, positions_, options);
  if (!piece.head) return;
  Parameter* table = *config_.tied_head && front_ != nullptr ? &front_->table() : nullptr;
  add_head<nn::VocabHead>("", config_, sharding().tensor, numerics().compute, table);
}

double Decoder::flops_per_token(std::int64_t seq_length) const {
  return tessera::flops_per_token(config_, seq_length, FlopConvention::causal);
}

std::int64_t Decoder::max_positions() const {
  return std::min(config_.max_positions, config_.sliding_window.value_or(config_.max_positions));
}

std::int64_t Decoder::position_limit() const {
  if (*config_.position_embedding == PositionKind::learned) return config_.max_positions;
  return std::max(config_.max_positions, kMostComputedPositions);
}

void Decoder::check_length(std::int64_t seq_length) const {
  const std::int64_t window = config_.sliding_window.value_or(seq_length);
  if (seq_length > window)
    throw InvalidArgument(detail::concat(
        "a sequence of ", seq_length, " tokens is longer than the model's sliding window of ", window,
        ": attention with a window that hides keys is not in this build; cut "
        "the samples to it"));
  if (seq_length > position_limit())
    throw InvalidArgument(detail::concat("a sequence of ", seq_length, " tokens is longer than the model's ",
                                         position_limit(),
                                         " positions; cut the samples, or make the model with more"));
}

}  // namespace tessera
