#include "tessera/nn/models/decoder.hpp"

#include "tessera/base/model_math.hpp"

namespace tessera {

Numerics numerics_of(const TrainingConfig& training) {
  const DType compute = training.precision == Precision::bf16 ? DType::bf16 : DType::f32;
  return {compute, training.fp32_residual ? DType::f32 : compute};
}

namespace nn {

DecoderLayer::DecoderLayer(std::string name, const ModelConfig& config, std::int64_t layer, DType compute)
    : Module(std::move(name)),
      dropout_(config.dropout),
      input_norm_(
          submodule<Norm>("input_layernorm", config.hidden_size, *config.norm, config.norm_eps, compute)),
      attention_(submodule<SelfAttention>("self_attention", config, layer)),
      mlp_norm_(
          submodule<Norm>("pre_mlp_layernorm", config.hidden_size, *config.norm, config.norm_eps, compute)),
      mlp_(submodule<Mlp>("mlp", config)) {}

ResidualStream DecoderLayer::forward(const Forward& forward, const ResidualStream& stream,
                                     const ops::RopeTable* rope, const Tensor& alibi_slopes) {
  const ResidualNorm in = input_norm_.forward(forward, stream.residual, stream.branch, stream.dropout);
  const Var attended = attention_.forward(forward, in.y, rope, alibi_slopes);
  const ResidualNorm mid =
      mlp_norm_.forward(forward, in.residual, attended, forward.dropout(attention_.name(), dropout_));
  return {mid.residual, mlp_.forward(forward, mid.y), forward.dropout(mlp_.name(), dropout_)};
}

}  // namespace nn

Decoder::Decoder(const ModelConfig& config, const Numerics& numerics)
    : config_(config),
      numerics_(numerics),
      embedding_(submodule<nn::Embedding>(
          "embedding", nn::Embedding::Options{
                           config_.vocab_size, config_.hidden_size,
                           *config_.position_embedding == PositionKind::learned ? config_.max_positions : 0,
                           config_.init_std, config_.dropout, numerics.residual})) {
  for (std::int64_t i = 0; i < config_.num_layers; ++i) {
    layers_.push_back(
        &submodule<nn::DecoderLayer>("decoder.layers." + std::to_string(i), config_, i, numerics.compute));
  }
  final_norm_ = &submodule<nn::Norm>("decoder.final_layernorm", config_.hidden_size, *config_.norm,
                                     config_.norm_eps, numerics.compute);
  head_ = *config_.tied_head ? &embedding_.table()
                             : &parameter("output_layer.weight", {config_.vocab_size, config_.hidden_size},
                                          Init::normal(static_cast<float>(config_.init_std)));
}

Var Decoder::hidden(const Forward& forward) {
  const ops::RopeTable* table = rope(forward.exec);
  if (*config_.position_embedding == PositionKind::alibi && !alibi_slopes_) {
    alibi_slopes_ = Tensor::from(forward.exec, nn::alibi_slopes(config_.num_heads), {config_.num_heads});
  }
  nn::ResidualStream stream{embedding_.forward(forward), {}, {}};
  for (nn::DecoderLayer* layer : layers_) stream = layer->forward(forward, stream, table, alibi_slopes_);
  return final_norm_->forward(forward, stream.residual, stream.branch, stream.dropout).y;
}

Var Decoder::forward(const Forward& forward) {
  // Rows of logits start on cache-line boundaries whatever the vocabulary: the head is the largest product of
  // all.
  constexpr std::int64_t kRowPadding = 32;
  return linear(forward.exec, hidden(forward), *head_, nullptr, kRowPadding);
}

Var Decoder::loss(const Forward& forward, const Tensor& upstream) {
  return linear_cross_entropy(forward.exec, hidden(forward), *head_, forward.input.labels, upstream);
}

double Decoder::flops_per_token(std::int64_t seq_length) const {
  return tessera::flops_per_token(config_, seq_length, FlopConvention::causal);
}

KvCache Decoder::make_cache(const ExecCtx& ctx, std::int64_t batch, std::int64_t max_length) const {
  KvCache cache;
  for (std::int64_t i = 0; i < config_.num_layers; ++i) {
    const Shape shape{max_length, batch, config_.num_kv_heads, config_.head_dim};
    cache.key.push_back(Tensor::empty(ctx, shape, numerics_.compute));
    cache.value.push_back(Tensor::empty(ctx, shape, numerics_.compute));
  }
  return cache;
}

const ops::RopeTable* Decoder::rope(const ExecCtx& ctx) {
  if (*config_.position_embedding != PositionKind::rotary) return nullptr;
  if (!rope_table_.cos) {
    const auto rotary =
        static_cast<std::int64_t>(static_cast<double>(config_.head_dim) * config_.rope_fraction) / 2 * 2;
    rope_table_ = ops::make_rope_table(ctx, config_.max_positions, rotary, config_.rope_theta,
                                       config_.rope_scaling, config_.rope_interleaved);
  }
  return &rope_table_;
}

}  // namespace tessera
