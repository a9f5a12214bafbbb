#include "engine/plan_activations.hpp"

#include <algorithm>

#include "tessera/comm/placement.hpp"

namespace tessera::detail {
namespace {

// As in linear_cross_entropy and vocab_linear_cross_entropy.
constexpr std::int64_t kHeadRows = 512, kHeadPadding = 32;

std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

void add(std::vector<TrafficTerm>& terms, std::string_view name, std::int64_t bytes) {
  if (bytes == 0) return;
  const auto same = std::find_if(terms.begin(), terms.end(),
                                 [&](const TrafficTerm& t) { return t.axis == "tp" && t.name == name; });
  if (same != terms.end()) {
    same->bytes += bytes;
  } else {
    terms.push_back({"tp", name, bytes});
  }
}

}  // namespace

std::int64_t Collective::all_reduce(std::int64_t elements, std::int64_t element_bytes) const {
  const std::int64_t own = part_of(elements, rank, size).count;
  return (elements - own + (size - 1) * own) * element_bytes;
}

std::int64_t Collective::part(std::int64_t elements, std::int64_t element_bytes) const {
  return (elements - elements / size) * element_bytes;
}

Activations::Activations(const Config& config, int tensor_rank)
    : recompute_(RecomputeOptions::from(config.training)),
      tensor_{tensor_rank, static_cast<int>(config.parallel.tensor)} {
  const ModelConfig& m = config.model;
  const std::int64_t t = config.parallel.tensor;
  sequence_ = config.parallel.sequence && t > 1;
  swiglu_ = *m.activation == MlpActivation::swiglu;
  rows_ = config.training.seq_length * config.training.micro_batch_size;
  own_rows_ = sequence_ ? rows_ / t : rows_;
  width_ = m.hidden_size;
  heads_ = m.num_heads / t;
  query_ = heads_ * m.head_dim;
  qkv_ = query_ + 2 * std::max<std::int64_t>(1, m.num_kv_heads / t) * m.head_dim;
  ffn_ = m.ffn_hidden_size / t;
  fc1_ = swiglu_ ? 2 * ffn_ : ffn_;
  vocab_ = part_of(m.vocab_size, tensor_rank, static_cast<int>(t)).count;
  const bool half = config.training.precision != Precision::fp32;
  compute_ = half ? 2 : 4;
  residual_ = half && !config.training.fp32_residual ? 2 : 4;
  stream_ = own_rows_ * width_ * residual_;
  stats_ = 4 * own_rows_ * (*m.norm == NormStyle::layernorm ? 2 : 1);
}

Activations::Segments Activations::segments(const ModelPiece& piece) const {
  const std::int64_t layers = piece.num_layers, n = recompute_.layers;
  if (recompute_.what != Recompute::full) return {};
  if (recompute_.method == RecomputeMethod::block) {
    const std::int64_t count = std::min(n, layers);
    return {count, std::min<std::int64_t>(1, count), count};
  }
  return {(layers + n - 1) / n, std::min(n, layers), layers};
}

std::int64_t Activations::layer_kept() const {
  const std::int64_t norms = 2 * (stream_ + stats_);
  const bool forget = recompute_.what == Recompute::selective;
  const std::int64_t norm_outputs = forget ? 0 : 2 * own_rows_ * width_ * compute_;
  const std::int64_t attention = rows_ * (qkv_ + query_) * compute_ + 4 * rows_ * heads_;
  return norms + norm_outputs + attention + rows_ * fc1_ * compute_;
}

std::int64_t Activations::layer_deferred() const {
  const bool forget = recompute_.what == Recompute::selective;
  // Inputs of the linears, and the gradient of what each of them and each norm gave.
  const std::int64_t inputs = (forget ? 0 : 2 * own_rows_ * width_) + rows_ * (query_ + fc1_);
  const std::int64_t grads = 2 * own_rows_ * width_ + rows_ * (qkv_ + fc1_ + 2 * width_);
  return 2 * (stream_ + stats_) + (inputs + grads) * compute_;
}

std::int64_t Activations::segment_input() const {
  if (!recompute_.partition || sequence_ || tensor_.size == 1) return stream_;
  return part_of(rows_ * width_, tensor_.rank, tensor_.size).count * residual_;
}

std::int64_t Activations::kept(const ModelPiece& piece) const {
  const Segments again = segments(piece);
  std::int64_t bytes = again.count * segment_input() + (piece.num_layers - again.layers) * layer_kept();
  // The sum before the final norm, the head's input gradient, the losses and their gradients.
  if (piece.head) bytes += stream_ + stats_ + own_rows_ * width_ * compute_ + 8 * rows_;
  return bytes;
}

std::int64_t Activations::deferred(const ModelPiece& piece) const {
  std::int64_t bytes = piece.num_layers * layer_deferred();
  if (piece.embedding) bytes += stream_;
  if (piece.head) bytes += stream_ + stats_ + own_rows_ * width_ * compute_ + 4 * rows_;
  return bytes;
}

std::int64_t Activations::layer_temporary() const {
  const std::int64_t gathered = sequence_ ? rows_ * width_ * compute_ : 0;
  const std::int64_t mlp = rows_ * (width_ + fc1_ + ffn_) * compute_;
  const std::int64_t fc1 = rows_ * (fc1_ + width_) * compute_ + gathered;
  const std::int64_t attention = rows_ * (query_ + qkv_) * compute_;
  const std::int64_t qkv = rows_ * (qkv_ + width_) * compute_ + gathered;
  return stream_ + std::max({mlp, fc1, attention, qkv});
}

std::int64_t Activations::head_temporary() const {
  const std::int64_t count = std::min(kHeadRows, rows_);
  const std::int64_t logits = count * round_up(vocab_, kHeadPadding) * compute_;
  const std::int64_t parts = tensor_.size > 1 ? 8 * count * (tensor_.size + 1) : 0;
  // The normalised values; with sequence parallelism all positions of them and of their gradient.
  const std::int64_t hidden = own_rows_ * width_ + (sequence_ ? 2 * rows_ * width_ : 0);
  return hidden * compute_ + logits + parts + 4 * count;
}

std::int64_t Activations::temporary(const ModelPiece& piece) const {
  const Segments again = segments(piece);
  const std::int64_t layer = piece.num_layers > 0 ? layer_temporary() : 0;
  std::int64_t bytes = layer;
  if (again.count > 0) {
    // The first norm of a segment keeps the segment's input itself. Layers that are not recomputed come after
    // those that are, so backward has freed them by then.
    const std::int64_t shared = segment_input() == stream_ ? stream_ : 0;
    const std::int64_t freed = (piece.num_layers - again.layers) * layer_kept();
    bytes = std::max(bytes, layer + again.largest * layer_kept() - shared - freed);
  }
  return piece.head ? std::max(bytes, head_temporary()) : bytes;
}

void Activations::add_traffic(const ModelPiece& piece, std::int64_t micro_batches,
                              std::vector<TrafficTerm>& terms) const {
  if (tensor_.size == 1) return;
  const std::int64_t stream = rows_ * width_, m = micro_batches;
  const std::int64_t whole = tensor_.all_reduce(stream, compute_), part = tensor_.part(stream, compute_);
  // Per layer: two sums of what attention and MLP give and two of their input gradients, each an all-reduce,
  // or a reduce-scatter with an all-gather for its counterpart; two more gathers of inputs that are not kept.
  const std::int64_t forward = sequence_ ? 4 * part : 2 * whole;
  const std::int64_t backward = sequence_ ? 6 * part : 2 * whole;
  const Segments again = segments(piece);
  add(terms, "layers, forward", m * piece.num_layers * forward);
  add(terms, "layers, backward", m * piece.num_layers * backward);
  add(terms, "layers, recomputed forward", m * again.layers * forward);
  if (recompute_.partition && !sequence_) {
    const std::int64_t own = part_of(stream, tensor_.rank, tensor_.size).count;
    add(terms, "inputs of recomputed segments", m * again.count * (tensor_.size - 1) * own * residual_);
  }
  if (piece.embedding) {
    add(terms, "embedding, forward",
        m * (sequence_ ? tensor_.part(stream, residual_) : tensor_.all_reduce(stream, residual_)));
    add(terms, "embedding, backward", sequence_ ? m * tensor_.part(stream, residual_) : 0);
  }
  if (piece.head) {
    add(terms, "head, forward", sequence_ ? m * part : 0);
    add(terms, "head, backward", m * (sequence_ ? part : whole));
    add(terms, "vocabulary loss", m * (tensor_.size - 1) * 8 * rows_);
  }
}

std::int64_t peak_held(const std::vector<Action>& column, const std::vector<std::int64_t>& kept,
                       const std::vector<std::int64_t>& deferred) {
  std::int64_t held = 0, most = 0;
  for (const Action& action : column) {
    const auto chunk = static_cast<std::size_t>(action.chunk);
    switch (action.kind) {
      case Action::Kind::forward:
        held += kept[chunk];
        break;
      case Action::Kind::backward:
        held -= kept[chunk];
        break;
      case Action::Kind::input_gradient:
        held += deferred[chunk] - kept[chunk];
        break;
      case Action::Kind::weight_gradient:
        held -= deferred[chunk];
        break;
    }
    most = std::max(most, held);
  }
  return most;
}

PassTimes pass_times(const Config& config, const ModelPiece& piece) {
  const ModelConfig& m = config.model;
  const double width = static_cast<double>(m.hidden_size), layers = static_cast<double>(piece.num_layers);
  const double query = static_cast<double>(m.num_heads * m.head_dim);
  const double kv = static_cast<double>(m.num_kv_heads * m.head_dim);
  const double matrices = *m.activation == MlpActivation::swiglu ? 3 : 2;
  const double weights = width * (2 * query + 2 * kv + matrices * static_cast<double>(m.ffn_hidden_size));
  // Two products over the causal half; backward computes the scores again and has four more.
  const double attention = 2 * query * static_cast<double>(config.training.seq_length);
  PassTimes times{layers * (2 * weights + attention), layers * (2 * weights + 2.5 * attention),
                  layers * 2 * weights, 0};
  const RecomputeOptions recompute = RecomputeOptions::from(config.training);
  if (recompute.what == Recompute::full) {
    const bool block = recompute.method == RecomputeMethod::block;
    const auto again = static_cast<double>(std::min(recompute.layers, piece.num_layers));
    times.input_gradient += times.forward * (block && layers > 0 ? again / layers : 1.0);
  }
  // The head's gradients are computed with its loss.
  if (piece.head) times.forward += 6 * width * static_cast<double>(m.vocab_size);
  // So that a piece of the embedding alone is not free.
  if (piece.embedding) times.forward += 2 * width;
  const double t = static_cast<double>(config.parallel.tensor);
  return {times.forward / t, times.input_gradient / t, times.weight_gradient / t, 0};
}

}  // namespace tessera::detail
