#include "tessera/nn/stack.hpp"

#include <algorithm>

#include "tessera/autograd/recompute.hpp"
#include "tessera/base/config.hpp"

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

/// Where a rank's residual stream begins.
Forward on_own_positions(Forward forward, const TensorParallel& tensor) {
  if (tensor.sharded_sequence()) forward.position0 = forward.input.seq_length / tensor.size() * tensor.rank();
  return forward;
}

}  // namespace

Numerics numerics_of(const TrainingConfig& training) {
  const DType compute = compute_dtype(training.precision);
  return {compute, training.fp32_residual ? DType::f32 : compute};
}

Var fold(const ExecCtx& ctx, const Flow& flow) {
  if (!flow.branch) return flow.residual;
  return add(ctx, flow.residual, dropout(ctx, flow.branch, flow.dropout));
}

Stack::Stack(std::int64_t hidden_size, std::int64_t num_layers, const Numerics& numerics,
             const Sharding& sharding)
    : hidden_size_(hidden_size), numerics_(numerics), sharding_(sharding) {
  if (sharding_.pieces.empty()) sharding_.pieces = {{0, num_layers, true, true}};
}

bool Stack::holds_head() const {
  return std::ranges::any_of(sharding_.pieces, [](const ModelPiece& p) { return p.head; });
}

Var Stack::forward(const Forward& forward) { return run_all(forward, Output::logits, Tensor()); }

Var Stack::loss(const Forward& forward, const Tensor& upstream) {
  return run_all(forward, Output::losses, upstream);
}

Var Stack::run_all(const Forward& forward, Output output, const Tensor& upstream) {
  Var value;
  for (int piece = 0; piece < num_pieces(); ++piece)
    value = run_piece(forward, piece, value, output, upstream);
  return value;
}

Var Stack::run_piece(const Forward& whole, int index, const Var& input, Output output,
                     const Tensor& upstream) {
  TESSERA_CHECK(index >= 0 && index < num_pieces(), "piece ", index, " of ", num_pieces());
  const Piece& piece = piece_at(index);
  TESSERA_CHECK(static_cast<bool>(input) != (piece.front != nullptr),
                "the first piece of a model begins with tokens, and no other does");
  prepare(whole.exec);
  const Forward forward = on_own_positions(whole, sharding_.tensor);
  Flow flow{input, {}, {}};
  if (piece.front != nullptr) flow = piece.front->forward(whole, std::move(flow));
  flow = run_layers(forward, piece, std::move(flow));
  return piece.head != nullptr ? piece.head->forward(forward, flow, output, upstream)
                               : fold(forward.exec, flow);
}

Flow Stack::run_layers(const Forward& forward, const Piece& piece, Flow flow) {
  const RecomputeOptions& again = sharding_.recompute;
  const bool recomputes = again.what == Recompute::full && forward.tape != nullptr;
  const auto count = piece.layers.size(), n = static_cast<std::size_t>(again.layers);
  for (std::size_t i = 0; i < count;) {
    if (recomputes && (again.method == RecomputeMethod::uniform || i < n)) {
      const std::size_t size = again.method == RecomputeMethod::uniform ? std::min(n, count - i) : 1;
      flow = run_recomputed(forward, piece, i, size, flow);
      i += size;
    } else {
      flow = piece.layers[i++]->forward(forward, std::move(flow));
    }
  }
  return flow;
}

Flow Stack::run_recomputed(const Forward& forward, const Piece& piece, std::size_t first, std::size_t count,
                           const Flow& flow) {
  const auto begin = piece.layers.begin() + static_cast<std::ptrdiff_t>(first);
  std::vector<Block*> layers(begin, begin + static_cast<std::ptrdiff_t>(count));
  std::vector<Parameter*> parameters;
  for (Block* layer : layers) {
    for (Parameter* p : layer->parameters()) {
      if (p->trained()) parameters.push_back(p);
    }
  }
  // `forward` refers to the context and the micro-batch, which outlive the tape; its own tape is not used
  // here.
  const auto part = [forward, layers = std::move(layers)](const std::vector<Var>& inputs) {
    Flow inner{inputs[0], {}, {}};
    for (Block* layer : layers) inner = layer->forward(forward, std::move(inner));
    return std::vector<Var>{fold(forward.exec, inner)};
  };
  const bool partition = sharding_.recompute.partition && !sharding_.tensor.sharded_sequence();
  const auto outputs = recompute(forward.exec, {fold(forward.exec, flow)}, std::move(parameters), part,
                                 partition ? sharding_.tensor.comm : nullptr);
  return {outputs[0], {}, {}};
}

int Stack::pieces_using(const Parameter& parameter) const {
  const auto borrows = [&](const Piece& p) { return p.head != nullptr && p.head->borrowed() == &parameter; };
  const auto borrower = std::ranges::find_if(pieces_, borrows);
  // Only the first blocks' parameters are borrowed: a piece that has both ends uses such a one once.
  return borrower == pieces_.end() || borrower->front != nullptr ? 1 : 2;
}

std::pair<Shape, DType> Stack::boundary(std::int64_t batch, std::int64_t seq_length) const {
  const std::int64_t ranks = sharding_.tensor.sharded_sequence() ? sharding_.tensor.size() : 1;
  return {Shape{seq_length / ranks, batch, hidden_size_}, numerics_.residual};
}

KvCache Stack::make_cache(const ExecCtx& ctx, std::int64_t batch, std::int64_t max_length) const {
  TESSERA_CHECK(pieces_.size() == 1 && pieces_[0].front != nullptr && pieces_[0].head != nullptr,
                "text is generated by a rank that holds every layer, not by a stage of a pipeline");
  KvCache cache;
  for (const Block* layer : pieces_[0].layers) {
    const Block::CacheShape kept = layer->cache_shape();
    const Shape shape{max_length, batch, kept.kv_heads, kept.head_dim};
    cache.key.push_back(Tensor::empty(ctx, shape, numerics_.compute));
    cache.value.push_back(Tensor::empty(ctx, shape, numerics_.compute));
  }
  return cache;
}

}  // namespace tessera
