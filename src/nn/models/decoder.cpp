#include "tessera/nn/models/decoder.hpp"

#include <algorithm>
#include <cmath>

#include "nn/models/norm_options.hpp"
#include "nn/own_positions.hpp"
#include "tessera/base/config.hpp"
#include "tessera/base/model_math.hpp"

namespace tessera {
namespace nn {
ops::RopeRule PositionTables::rule() const {
  return {.theta = config_.rope_theta,
          .scaling = config_.rope_scaling,
          .trained = config_.max_positions,
          .interleaved = config_.rope_interleaved};
}

std::int64_t PositionTables::key_of(std::int64_t length) const {
  const std::int64_t usual = longest_usual();
  if (usual == 0 || length <= usual) return 0;
  return config_.rope_scaling.type == RopeType::dynamic ? length : 1;
}

void PositionTables::make(const ExecCtx& ctx, std::int64_t length) {
  if (rotary() && !ropes_.contains(key_of(length)))
    make_rope(ctx, std::max({made_, config_.max_positions, length}), length);
  if (config_.position_embedding == PositionKind::alibi && !alibi_slopes_)
    alibi_slopes_ = Tensor::from(ctx, nn::alibi_slopes(config_.num_heads), {config_.num_heads});
}

std::int64_t PositionTables::reserve(const ExecCtx& ctx, std::int64_t positions, std::int64_t limit) {
  if (!rotary()) return 0;
  if (positions <= std::max(made_, config_.max_positions)) return made_;
  // Twice as many: ever longer samples make few tables.
  made_ = std::min(2 * positions, limit);
  local_ = {};
  for (auto& [key, table] : ropes_) table = {};
  for (const auto& [key, table] : std::map(ropes_))
    make_rope(ctx, made_, key == 1 ? longest_usual() + 1 : key);
  if (ropes_.empty()) make_rope(ctx, made_, 0);
  return made_;
}

void PositionTables::make_rope(const ExecCtx& ctx, std::int64_t positions, std::int64_t length) {
  const auto rotary =
      static_cast<std::int64_t>(static_cast<double>(config_.head_dim) * config_.rope_fraction) / 2 * 2;
  made_ = positions;
  ropes_[key_of(length)] = ops::make_rope_table(ctx, positions, rotary, rule(), length);
  if (!config_.rope_local_theta || local_.cos) return;
  local_ = ops::make_rope_table(
      ctx, positions, rotary, {.theta = *config_.rope_local_theta, .interleaved = config_.rope_interleaved});
}

const ops::RopeTable* PositionTables::rope(std::int64_t layer, std::int64_t length) const {
  if (!rotary()) return nullptr;
  if (rotates_locally(config_, layer)) return &local_;
  return &ropes_.at(key_of(length));
}

namespace {

/// sqrt(hidden_size) as the models in circulation have it: rounded to their weights' dtype.
float embedding_scale(const ModelConfig& config, DType compute) {
  if (!config.embedding_scaled) return 1.0f;
  const auto root = static_cast<float>(std::sqrt(static_cast<double>(config.hidden_size)));
  if (compute == DType::bf16) return static_cast<float>(bfloat16(root));
  return compute == DType::f16 ? static_cast<float>(float16(root)) : root;
}

Embedding::Options without_dropout(Embedding::Options options) {
  options.dropout = 0.0;
  return options;
}

}  // namespace

DecoderFront::DecoderFront(std::string name, const ModelConfig& config, const Numerics& numerics,
                           const Embedding::Options& options)
    : Block(std::move(name)),
      tensor_(options.tensor),
      scale_(embedding_scale(config, numerics.compute)),
      dropout_(config.embedding_norm ? options.dropout : 0.0),
      embedding_(
          submodule<Embedding>("embedding", config.embedding_norm ? without_dropout(options) : options)),
      norm_(config.embedding_norm
                ? &submodule<Norm>("embedding.norm", norm_options(config, options.tensor, numerics.residual))
                : nullptr) {}

Flow DecoderFront::forward(const Forward& forward, Flow) {
  Var x = embedding_.forward(forward);
  if (scale_ != 1.0f) x = scale(forward.exec, x, scale_);
  if (norm_ == nullptr) return {x, {}, {}};
  x = norm_->forward(forward, x, {}).y;
  return {dropout(forward.exec, x, on_own_positions(forward, tensor_).dropout(embedding_.name(), dropout_)),
          {},
          {}};
}

DecoderLayer::DecoderLayer(std::string name, const ModelConfig& config, std::int64_t layer,
                           const PositionTables& positions, const Options& options)
    : Block(std::move(name)),
      layer_(layer),
      dropout_(config.dropout),
      compute_(options.compute),
      parallel_(config.parallel_residual),
      cache_{head_share(config, options.tensor).kv_heads, config.head_dim},
      positions_(positions),
      input_norm_(nullptr),
      attention_(declare_attention(config, layer, options)),
      attention_norm_(declare_norm("post_attention_layernorm", config, options,
                                   config.norm_placement != NormPlacement::pre)),
      mlp_norm_(declare_norm("pre_mlp_layernorm", config, options,
                             config.norm_placement != NormPlacement::post && !config.shared_norm)),
      mlp_(declare_mlp(config, layer, options)),
      behind_norm_(
          declare_norm("post_mlp_layernorm", config, options, config.norm_placement != NormPlacement::pre)) {}

Norm* DecoderLayer::declare_norm(const char* name, const ModelConfig& config, const Options& options,
                                 bool wanted) {
  if (!wanted) return nullptr;
  return &submodule<Norm>(name, norm_options(config, options.tensor, options.compute, options.forget_norms));
}

SelfAttention& DecoderLayer::declare_attention(const ModelConfig& config, std::int64_t layer,
                                               const Options& options) {
  // Declared first, as it comes first.
  input_norm_ =
      declare_norm("input_layernorm", config, options, config.norm_placement != NormPlacement::post);
  return submodule<SelfAttention>("self_attention", config, layer, options.tensor, options.causal);
}

FeedForward& DecoderLayer::declare_mlp(const ModelConfig& config, std::int64_t layer,
                                       const Options& options) {
  if (experts_of(config, layer) > 0)
    return submodule<MixtureOfExperts>("mlp", config, options.tensor, options.experts);
  return submodule<Mlp>("mlp", config, options.tensor);
}

Var DecoderLayer::attend(const Forward& forward, const Var& x) {
  return attention_.forward(forward, x, positions_.rope(layer_, length_of(forward)),
                            positions_.alibi_slopes());
}

Flow DecoderLayer::forward(const Forward& forward, Flow flow) {
  if (input_norm_ == nullptr) return forward_post(forward, flow);
  const ResidualNorm in = input_norm_->forward(forward, flow.residual, flow.branch, flow.dropout);
  if (parallel_) return forward_parallel(forward, in);
  Var attended = attend(forward, in.y);
  if (attention_norm_ != nullptr) attended = attention_norm_->forward(forward, attended, {}).y;
  const ResidualNorm mid =
      mlp_norm_->forward(forward, in.residual, attended, forward.dropout(attention_.name(), dropout_));
  Var branch = mlp_.forward(forward, mid.y);
  if (behind_norm_ != nullptr) branch = behind_norm_->forward(forward, branch, {}).y;
  return {mid.residual, branch, forward.dropout(mlp_.name(), dropout_)};
}

Flow DecoderLayer::forward_parallel(const Forward& forward, const ResidualNorm& in) {
  const Var attended = attend(forward, in.y);
  const Var own = mlp_norm_ != nullptr ? mlp_norm_->forward(forward, in.residual, {}).y : in.y;
  const Var residual =
      fold(forward.exec, {in.residual, attended, forward.dropout(attention_.name(), dropout_)});
  return {residual, mlp_.forward(forward, own), forward.dropout(mlp_.name(), dropout_)};
}

/// Each branch reads the stream as it is, and is normed before it is added.
Flow DecoderLayer::forward_post(const Forward& forward, const Flow& flow) {
  const ExecCtx& ctx = forward.exec;
  const Var x = fold(ctx, flow);
  const Var attended = attention_norm_->forward(forward, attend(forward, cast(ctx, x, compute_)), {}).y;
  const Var mid = fold(ctx, {x, attended, forward.dropout(attention_.name(), dropout_)});
  const Var branch = behind_norm_->forward(forward, mlp_.forward(forward, cast(ctx, mid, compute_)), {}).y;
  return {mid, branch, forward.dropout(mlp_.name(), dropout_)};
}

VocabHead::VocabHead(std::string name, const ModelConfig& config, const TensorParallel& tensor, DType compute,
                     Parameter* table)
    : Head(std::move(name)),
      tensor_(tensor),
      softcap_(static_cast<float>(config.logit_softcap)),
      norm_(submodule<Norm>("decoder.final_layernorm", norm_options(config, tensor, compute))),
      table_(table),
      weight_(table != nullptr ? *table : declare_weight(config)) {}

Parameter& VocabHead::declare_weight(const ModelConfig& config) {
  const Placement rows =
      Placement::split({config.vocab_size, config.hidden_size}, 0, tensor_.rank(), tensor_.size());
  const Init init = Init::normal(static_cast<float>(config.init_std));
  if (!config.tied_head) return parameter("output_layer.weight", rows, init);
  // A tied head whose embedding is on another stage is a copy of it under the same name, laid out alike.
  return parameter("embedding.word_embeddings.weight", rows, init,
                   {.reads_main = true, .tied = true, .counted = false});
}

Var VocabHead::forward(const Forward& forward, const Flow& flow, Model::Output output,
                       const Tensor& upstream) {
  const ExecCtx& ctx = forward.exec;
  const Var hidden = norm_.forward(forward, flow.residual, flow.branch, flow.dropout).y;
  const TensorParallel tensor = forward.shared(tensor_);
  if (output == Model::Output::losses)
    return vocab_linear_cross_entropy(ctx, tensor, hidden, weight_, forward.input.labels, upstream, nullptr,
                                      softcap_, forward.input.labelled);
  if (output == Model::Output::own_logits)
    return own_vocab_logits(ctx, tensor, hidden, weight_, nullptr, softcap_);
  return vocab_logits(ctx, tensor, hidden, weight_, nullptr, softcap_);
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
  TESSERA_ENSURE(ConfigError, config_.vocab_size >= given.tensor.size(), "model.vocab_size (",
                 config_.vocab_size, ") is less than parallel.tensor (", given.tensor.size(), ")");
  for (const ModelPiece& piece : sharding().pieces) add_piece(piece);
}

nn::Embedding::Options Decoder::embedding_options() const {
  return {.vocab_size = config_.vocab_size,
          .size = config_.hidden_size,
          .max_positions = config_.position_embedding == PositionKind::learned ? config_.max_positions : 0,
          .std = config_.init_std,
          .dropout = embedding_dropout(config_),
          .out = numerics().residual,
          .tensor = sharding().tensor,
          .tied = config_.tied_head && !holds_head(),
          .padding_id = config_.padding_id.value_or(-1)};
}

void Decoder::add_piece(const ModelPiece& piece) {
  begin_piece();
  // Front and head have no name of their own: those of their parameters are the model's.
  if (piece.embedding) front_ = &add_front<nn::DecoderFront>("", config_, numerics(), embedding_options());
  const nn::DecoderLayer::Options options{.compute = numerics().compute,
                                          .tensor = sharding().tensor,
                                          .experts = sharding().experts,
                                          .forget_norms = sharding().recompute.what == Recompute::selective};
  for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i)
    add_layer<nn::DecoderLayer>("decoder.layers." + std::to_string(i), config_, i, positions_, options);
  if (!piece.head) return;
  Parameter* table = config_.tied_head && front_ != nullptr ? &front_->table() : nullptr;
  add_head<nn::VocabHead>("", config_, sharding().tensor, numerics().compute, table);
}

double Decoder::flops_per_token(const SampleLengths& lengths) const {
  return tessera::flops_per_token(config_, lengths.tokens, FlopConvention::causal);
}

std::vector<ExtraLossSpec> Decoder::extra_losses() const {
  const auto layers = static_cast<double>(layers_with_experts(config_));
  std::vector<ExtraLossSpec> losses;
  if (config_.router_aux_loss > 0.0)
    losses.push_back({nn::MixtureOfExperts::kBalance, layers * config_.router_aux_loss, LossCount::samples});
  if (config_.router_z_loss > 0.0)
    losses.push_back({nn::MixtureOfExperts::kZ, layers * config_.router_z_loss, LossCount::positions});
  return losses;
}

std::int64_t Decoder::position_limit() const {
  if (config_.position_embedding == PositionKind::learned) return config_.max_positions;
  return std::max(config_.max_positions, kMostComputedPositions);
}

void Decoder::check_length(std::int64_t seq_length) const {
  if (seq_length > position_limit())
    throw InvalidArgument(detail::concat("a sequence of ", seq_length, " tokens is longer than the model's ",
                                         position_limit(),
                                         " positions; cut the samples, or make the model with more"));
}

void Decoder::prepare(const Forward& forward) {
  const std::int64_t length = length_of(forward), usual = positions_.longest_usual();
  const bool anew = forward.input.document || forward.input.key_begin || forward.input.key_end;
  if (usual > 0 && length > usual && anew)
    throw InvalidArgument(detail::concat("sequences of ", length, " tokens are packed or padded: beyond ",
                                         usual, " positions ", name_of(config_.rope_scaling.type),
                                         " rotary positions go by the length of a sequence, which must be "
                                         "one document from its first token to "
                                         "its last; cut the samples to ",
                                         usual, " or give them whole"));
  positions_.make(forward.exec, length);
}

void Decoder::check_generates(std::int64_t length) const {
  const std::int64_t usual = positions_.longest_usual();
  // Keys in a cache were turned for a shorter sequence.
  if (usual > 0 && length > usual)
    throw InvalidArgument(detail::concat("text is generated up to ", usual, " tokens, prompt included, with ",
                                         name_of(config_.rope_scaling.type), " rotary positions, not up to ",
                                         length, ": ask for fewer new tokens"));
  Stack::check_generates(length);
}

}  // namespace tessera
