#include "tessera/nn/models/decoder.hpp"

#include <algorithm>

#include "tessera/autograd/recompute.hpp"
#include "tessera/base/model_math.hpp"

namespace tessera {

namespace {

DType compute_dtype(Precision precision) {
  switch (precision) {
    case Precision::fp32:
      return DType::f32;
    case Precision::bf16:
      return DType::bf16;
    case Precision::fp16:
      return DType::f16;
  }
  throw InternalError("a precision without a dtype");
}

}  // namespace

Numerics numerics_of(const TrainingConfig& training) {
  const DType compute = compute_dtype(training.precision);
  return {compute, training.fp32_residual ? DType::f32 : compute};
}

namespace nn {
namespace {

Norm::Options norm_options(const ModelConfig& config, const DecoderLayer::Options& options) {
  return {.size = config.hidden_size,
          .style = *config.norm,
          .eps = config.norm_eps,
          .out = options.compute,
          .sequence_parallel = options.tensor.sharded_sequence(),
          .forget = options.forget_norms};
}

}  // namespace

DecoderLayer::DecoderLayer(std::string name, const ModelConfig& config, std::int64_t layer,
                           const Options& options)
    : Module(std::move(name)),
      dropout_(config.dropout),
      input_norm_(submodule<Norm>("input_layernorm", norm_options(config, options))),
      attention_(submodule<SelfAttention>("self_attention", config, layer, options.tensor)),
      mlp_norm_(submodule<Norm>("pre_mlp_layernorm", norm_options(config, options))),
      mlp_(submodule<Mlp>("mlp", config, options.tensor)) {}

ResidualStream DecoderLayer::forward(const Forward& forward, const ResidualStream& stream,
                                     const ops::RopeTable* rope, const Tensor& alibi_slopes) {
  const ResidualNorm in = input_norm_.forward(forward, stream.residual, stream.branch, stream.dropout);
  const Var attended = attention_.forward(forward, in.y, rope, alibi_slopes);
  const ResidualNorm mid =
      mlp_norm_.forward(forward, in.residual, attended, forward.dropout(attention_.name(), dropout_));
  return {mid.residual, mlp_.forward(forward, mid.y), forward.dropout(mlp_.name(), dropout_)};
}

}  // namespace nn

namespace {

/// The rotary angle of a position is a product in fp32, which tells no more positions apart.
constexpr std::int64_t kMostComputedPositions = std::int64_t{1} << 24;

/// residual + dropout(branch): what may leave a piece or enter a recomputed part as one tensor.
Var fold(const ExecCtx& ctx, const nn::ResidualStream& stream) {
  if (!stream.branch) return stream.residual;
  return add(ctx, stream.residual, dropout(ctx, stream.branch, stream.dropout));
}

/// Where a rank's residual stream begins.
Forward on_own_positions(Forward forward, const TensorParallel& tensor) {
  if (tensor.sharded_sequence()) forward.position0 = forward.input.seq_length / tensor.size() * tensor.rank();
  return forward;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const Numerics& numerics, const Sharding& sharding)
    : config_(config), numerics_(numerics), sharding_(sharding) {
  if (sharding_.pieces.empty()) sharding_.pieces = {{0, config_.num_layers, true, true}};
  TESSERA_ENSURE(ConfigError, config_.vocab_size >= sharding_.tensor.size(), "model.vocab_size (",
                 config_.vocab_size, ") is less than parallel.tensor (", sharding_.tensor.size(), ")");
  for (const ModelPiece& piece : sharding_.pieces) add_piece(piece);
}

void Decoder::add_piece(const ModelPiece& piece) {
  Piece part{.layers = {}, .embedding = piece.embedding, .head = piece.head};
  const auto has_head = [](const ModelPiece& p) { return p.head; };
  const bool head_here = std::any_of(sharding_.pieces.begin(), sharding_.pieces.end(), has_head);
  if (piece.embedding) {
    embedding_ = &submodule<nn::Embedding>(
        "embedding",
        nn::Embedding::Options{
            .vocab_size = config_.vocab_size,
            .size = config_.hidden_size,
            .max_positions = *config_.position_embedding == PositionKind::learned ? config_.max_positions : 0,
            .std = config_.init_std,
            .dropout = config_.embedding_dropout.value_or(config_.dropout),
            .out = numerics_.residual,
            .tensor = sharding_.tensor,
            .tied = *config_.tied_head && !head_here,
            .padding_id = config_.padding_id.value_or(-1)});
  }
  const nn::DecoderLayer::Options options{.compute = numerics_.compute,
                                          .tensor = sharding_.tensor,
                                          .forget_norms = sharding_.recompute.what == Recompute::selective};
  for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i) {
    part.layers.push_back(
        &submodule<nn::DecoderLayer>("decoder.layers." + std::to_string(i), config_, i, options));
  }
  pieces_.push_back(std::move(part));
  if (piece.head) add_head();
}

void Decoder::add_head() {
  const TensorParallel& tensor = sharding_.tensor;
  final_norm_ = &submodule<nn::Norm>("decoder.final_layernorm",
                                     nn::Norm::Options{.size = config_.hidden_size,
                                                       .style = *config_.norm,
                                                       .eps = config_.norm_eps,
                                                       .out = numerics_.compute,
                                                       .sequence_parallel = tensor.sharded_sequence()});
  if (*config_.tied_head && embedding_ != nullptr) {
    head_ = &embedding_->table();
    return;
  }
  // A tied head whose embedding is on another stage is a copy of it under the same name, laid out alike.
  const Placement rows =
      Placement::split({config_.vocab_size, config_.hidden_size}, 0, tensor.rank(), tensor.size());
  const Init init = Init::normal(static_cast<float>(config_.init_std));
  head_ = *config_.tied_head ? &parameter("embedding.word_embeddings.weight", rows, init,
                                          {.reads_main = true, .tied = true, .counted = false})
                             : &parameter("output_layer.weight", rows, init);
}

Var Decoder::forward(const Forward& forward) { return run_all(forward, Output::logits, Tensor()); }

Var Decoder::loss(const Forward& forward, const Tensor& upstream) {
  return run_all(forward, Output::losses, upstream);
}

Var Decoder::run_all(const Forward& forward, Output output, const Tensor& upstream) {
  Var value;
  for (int piece = 0; piece < num_pieces(); ++piece)
    value = run_piece(forward, piece, value, output, upstream);
  return value;
}

Var Decoder::run_piece(const Forward& whole, int index, const Var& input, Output output,
                       const Tensor& upstream) {
  TESSERA_CHECK(index >= 0 && index < num_pieces(), "piece ", index, " of ", num_pieces());
  const Piece& piece = pieces_[static_cast<std::size_t>(index)];
  TESSERA_CHECK(static_cast<bool>(input) != piece.embedding,
                "the first piece of a model begins with tokens, and no "
                "other does");
  make_tables(whole.exec);
  const Forward forward = on_own_positions(whole, sharding_.tensor);
  Stream stream{piece.embedding ? embedding_->forward(whole) : input, {}, {}};
  stream = run_layers(forward, piece, std::move(stream));
  return piece.head ? run_head(forward, stream, output, upstream) : fold(forward.exec, stream);
}

Decoder::Stream Decoder::run_layers(const Forward& forward, const Piece& piece, Stream stream) {
  const RecomputeOptions& again = sharding_.recompute;
  const bool recomputes = again.what == Recompute::full && forward.tape != nullptr;
  const auto count = piece.layers.size(), n = static_cast<std::size_t>(again.layers);
  for (std::size_t i = 0; i < count;) {
    if (recomputes && (again.method == RecomputeMethod::uniform || i < n)) {
      const std::size_t size = again.method == RecomputeMethod::uniform ? std::min(n, count - i) : 1;
      stream = run_recomputed(forward, piece, i, size, stream);
      i += size;
    } else {
      stream = piece.layers[i++]->forward(forward, stream, rope(), alibi_slopes_);
    }
  }
  return stream;
}

Decoder::Stream Decoder::run_recomputed(const Forward& forward, const Piece& piece, std::size_t first,
                                        std::size_t count, const Stream& stream) {
  std::vector<nn::DecoderLayer*> layers(piece.layers.begin() + static_cast<std::ptrdiff_t>(first),
                                        piece.layers.begin() + static_cast<std::ptrdiff_t>(first + count));
  std::vector<Parameter*> parameters;
  for (nn::DecoderLayer* layer : layers) {
    for (Parameter* p : layer->parameters()) {
      if (p->trained()) parameters.push_back(p);
    }
  }
  // `forward` refers to the context and the micro-batch, which outlive the tape; its own tape is not used
  // here.
  const auto part = [this, forward, layers = std::move(layers)](const std::vector<Var>& inputs) {
    Stream inner{inputs[0], {}, {}};
    for (nn::DecoderLayer* layer : layers) inner = layer->forward(forward, inner, rope(), alibi_slopes_);
    return std::vector<Var>{fold(forward.exec, inner)};
  };
  const bool partition = sharding_.recompute.partition && !sharding_.tensor.sharded_sequence();
  const auto outputs = recompute(forward.exec, {fold(forward.exec, stream)}, std::move(parameters), part,
                                 partition ? sharding_.tensor.comm : nullptr);
  return {outputs[0], {}, {}};
}

Var Decoder::run_head(const Forward& forward, const Stream& stream, Output output, const Tensor& upstream) {
  const ExecCtx& ctx = forward.exec;
  const TensorParallel& tensor = sharding_.tensor;
  const Var hidden = final_norm_->forward(forward, stream.residual, stream.branch, stream.dropout).y;
  if (output == Output::losses)
    return vocab_linear_cross_entropy(ctx, tensor, hidden, *head_, forward.input.labels, upstream);
  const Var logits = column_linear(ctx, tensor, hidden, *head_, nullptr, kHeadRowPadding);
  if (!tensor.active()) return logits;
  std::vector<std::int64_t> counts;
  for (int r = 0; r < tensor.size(); ++r)
    counts.push_back(part_of(config_.vocab_size, r, tensor.size()).count);
  return gather_features(ctx, tensor, logits, counts);
}

int Decoder::pieces_using(const Parameter& parameter) const {
  if (embedding_ == nullptr || &parameter != &embedding_->table() || head_ != &parameter) return 1;
  const bool together =
      std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& p) { return p.embedding && p.head; });
  return together ? 1 : 2;
}

std::pair<Shape, DType> Decoder::boundary(std::int64_t batch, std::int64_t seq_length) const {
  const std::int64_t ranks = sharding_.tensor.sharded_sequence() ? sharding_.tensor.size() : 1;
  return {Shape{seq_length / ranks, batch, config_.hidden_size}, numerics_.residual};
}

double Decoder::flops_per_token(std::int64_t seq_length) const {
  return tessera::flops_per_token(config_, seq_length, FlopConvention::causal);
}

KvCache Decoder::make_cache(const ExecCtx& ctx, std::int64_t batch, std::int64_t max_length) const {
  TESSERA_CHECK(sharding_.pieces.size() == 1 && sharding_.pieces[0].embedding && sharding_.pieces[0].head,
                "text is generated by a rank that holds every layer, not by a stage of a pipeline");
  const std::int64_t kv_heads = head_share(config_, sharding_.tensor).kv_heads;
  KvCache cache;
  for (std::int64_t i = 0; i < config_.num_layers; ++i) {
    const Shape shape{max_length, batch, kv_heads, config_.head_dim};
    cache.key.push_back(Tensor::empty(ctx, shape, numerics_.compute));
    cache.value.push_back(Tensor::empty(ctx, shape, numerics_.compute));
  }
  return cache;
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

std::int64_t Decoder::reserve_positions(const ExecCtx& ctx, std::int64_t positions) {
  if (*config_.position_embedding != PositionKind::rotary) return 0;
  const std::int64_t have = rope_table_.cos ? rope_table_.cos.size(0) : 0;
  if (positions <= std::max(have, config_.max_positions)) return have;
  // Twice as many: ever longer samples make few tables.
  make_rope(ctx, std::min(2 * positions, position_limit()));
  return rope_table_.cos.size(0);
}

void Decoder::make_rope(const ExecCtx& ctx, std::int64_t positions) {
  const auto rotary =
      static_cast<std::int64_t>(static_cast<double>(config_.head_dim) * config_.rope_fraction) / 2 * 2;
  rope_table_ = ops::make_rope_table(ctx, positions, rotary, config_.rope_theta, config_.rope_scaling,
                                     config_.rope_interleaved);
}

void Decoder::make_tables(const ExecCtx& ctx) {
  if (*config_.position_embedding == PositionKind::rotary && !rope_table_.cos)
    make_rope(ctx, config_.max_positions);
  if (*config_.position_embedding == PositionKind::alibi && !alibi_slopes_)
    alibi_slopes_ = Tensor::from(ctx, nn::alibi_slopes(config_.num_heads), {config_.num_heads});
}

}  // namespace tessera
