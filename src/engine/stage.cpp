#include "engine/stage.hpp"

#include <algorithm>
#include <iterator>

#include "engine/shard_flow.hpp"
#include "engine/step_memory.hpp"
#include "tessera/device/trace.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

Tensor zeros(const ExecCtx& ctx, const Shape& shape, DType dtype) {
  const Tensor result = Tensor::empty(ctx, shape, dtype);
  ops::fill_zero(ctx, result);
  return result;
}

}  // namespace

Batch blank_batch(const MicroBatchSize& size, const Model& model) {
  Batch batch{.batch = size.batch, .seq_length = size.seq_length};
  batch.tokens.assign(static_cast<std::size_t>(size.batch * size.seq_length), 0);
  batch.labels = batch.tokens;
  if (model.reads_encoder_tokens()) {
    batch.encoder_seq_length = size.encoder_seq_length;
    batch.encoder_tokens.assign(static_cast<std::size_t>(size.batch * size.encoder_seq_length), 0);
  }
  if (model.token_types() > 0) batch.token_types = batch.tokens;
  if (model.sample_classes() > 0) batch.sample_labels.assign(static_cast<std::size_t>(size.batch), 0);
  return batch;
}

Stage::Stage(const ExecCtx& ctx, Model& model, const Batch& batch, LossPlan loss, StageOptions options)
    : ctx_(ctx), model_(model), batch_(batch), loss_(std::move(loss)), options_(std::move(options)) {
  const std::int64_t size = options_.micro_batch_size, most = std::max(batch.batch, options_.most_samples);
  const std::int64_t count = options_.micro_batches > 0 ? options_.micro_batches : (most + size - 1) / size;
  inputs_.resize(static_cast<std::size_t>(most > 0 ? count : 0));
}

int Stage::full_micro_batches() const {
  int full = 0;
  while (full < micro_batches() && samples(full).count > 0) ++full;
  return full;
}

Part Stage::samples(int micro_batch) const {
  if (options_.micro_batches > 0) return part_of(batch_.batch, micro_batch, micro_batches());
  const std::int64_t size = options_.micro_batch_size, first = std::min(micro_batch * size, batch_.batch);
  return {first, std::min(size, batch_.batch - first)};
}

void Stage::keep_in(const StepMemory& memory, const std::shared_ptr<DeviceClock>& clock) {
  memory_ = &memory;
  loss_.keep_in(memory.gradients(), memory.sums());
  forward_spans_.set_clock(clock);
  backward_spans_.set_clock(clock);
}

const MicroBatch& Stage::input_of(int micro_batch) {
  if (memory_ != nullptr) return memory_->micro_batch(micro_batch);
  auto& input = inputs_[static_cast<std::size_t>(micro_batch)];
  if (!input) {
    const TraceSpan span(*ctx_.stream, [] { return Work{WorkKind::data, "micro-batch"}; });
    input = std::make_unique<MicroBatch>(make_micro_batch(ctx_, micro_batch));
  }
  return *input;
}

MicroBatch Stage::make_micro_batch(const ExecCtx& ctx, int index) const {
  const Batch piece = piece_of(index);
  return to_micro_batch(ctx, piece, options_.context.part(piece.seq_length), !model_.extra_losses().empty());
}

MicroBatchSize Stage::size_of(int micro_batch) const {
  const bool padding = is_padding(micro_batch);
  const std::int64_t length = padding ? padding_length() : batch_.seq_length;
  return {padding ? 1 : samples(micro_batch).count, options_.context.part(length).held(),
          batch_.encoder_seq_length};
}

std::int64_t Stage::padding_length() const {
  return batch_.seq_length > 0 ? batch_.seq_length : options_.padding_length;
}

Batch Stage::piece_of(int micro_batch) const {
  if (is_padding(micro_batch)) {
    Batch padding = blank_batch({1, padding_length(), batch_.encoder_seq_length}, model_);
    padding.labels.assign(padding.tokens.size(), kIgnoredLabel);
    return padding;
  }
  const Part part = samples(micro_batch);
  Batch piece = slice(batch_, part.begin, part.count);
  piece.sample0 += options_.samples_before;
  return piece;
}

std::vector<Port> Stage::inputs(int chunk, int micro_batch) const {
  return model_.inputs(chunk, size_of(micro_batch));
}

std::vector<Port> Stage::outputs(int chunk, int micro_batch) const {
  return model_.outputs(chunk, size_of(micro_batch));
}

std::vector<Tensor> Stage::forward(int chunk, int micro_batch, std::vector<Tensor> inputs) {
  std::vector<Tensor> results = run_forward(chunk, micro_batch, std::move(inputs));
  if (options_.flow != nullptr) options_.flow->end_pass();
  return results;
}

std::vector<Tensor> Stage::backward(int chunk, int micro_batch, std::vector<Tensor> grads, bool weights) {
  if (options_.flow != nullptr && weights) options_.flow->begin_gradients(chunk);
  std::vector<Tensor> results = run_backward(chunk, micro_batch, std::move(grads), weights);
  if (options_.flow != nullptr) options_.flow->end_pass();
  return results;
}

void Stage::weight_gradient(int chunk, int micro_batch) {
  if (options_.flow != nullptr) options_.flow->begin_gradients(chunk);
  const Spans::Span span(backward_spans_);
  if (computes(micro_batch)) {
    kept(chunk, micro_batch).tape->run_weight_gradients(ctx_);
    kept_.erase({chunk, micro_batch});
  }
  if (options_.flow != nullptr) options_.flow->end_pass();
}

std::vector<Tensor> Stage::run_forward(int chunk, int micro_batch, std::vector<Tensor> inputs) {
  const Spans::Span span(forward_spans_);
  if (!computes(micro_batch)) {
    if (model_.is_last(chunk)) return {};
    return empty_tensors(ctx_, outputs(chunk, micro_batch));
  }
  const MicroBatch& micro = input_of(micro_batch);
  const bool padding = is_padding(micro_batch);
  Kept local;
  local.last = model_.is_last(chunk);
  Tape* tape = options_.record ? local.tape.get() : nullptr;
  ExtraLosses losses;
  const Forward forward{.exec = ctx_,
                        .input = micro,
                        .tape = tape,
                        .training = options_.training,
                        .step = options_.step,
                        .losses = loss_.kind() == LossPlan::Kind::mean && !padding ? &losses : nullptr,
                        .step_at = memory_ != nullptr ? memory_->step() : nullptr,
                        .context = options_.context};
  for (Tensor& input : inputs)
    local.inputs.push_back(tape ? tape->input(std::move(input), true) : Var(std::move(input)));
  const std::int64_t positions = model_.reads_whole_samples() ? 1 : micro.seq_length;
  if (tape && local.last) local.upstream = loss_.known_gradient(ctx_, micro.batch * positions);
  if (padding && local.upstream) local.upstream = zeros(ctx_, local.upstream.shape(), DType::f32);
  local.outputs = model_.run_piece(forward, chunk, local.inputs, loss_.output(), local.upstream);
  for (Var& input : local.inputs) input.take();  // the tape keeps what it needs of it
  take_extra(losses, local);
  std::vector<Tensor> results;
  if (local.last) {
    finish(micro_batch, local);
  } else {
    for (Var& value : local.outputs) results.push_back(value.take());
  }
  if (options_.record) kept_.emplace(std::pair(chunk, micro_batch), std::move(local));
  return results;
}

void Stage::finish(int micro_batch, Kept& own) {
  TESSERA_CHECK_EQ(own.outputs.size(), 1u, "values that the last piece of the model returned");
  if (is_padding(micro_batch)) {
    const Tensor& output = own.outputs[0].value();
    if (!own.upstream) own.upstream = zeros(ctx_, output.shape(), output.dtype());
    return;
  }
  Tensor gradient = loss_.take(ctx_, micro_batch, micro_batches(), own.outputs[0].value());
  if (gradient) own.upstream = std::move(gradient);
}

void Stage::take_extra(const ExtraLosses& losses, Kept& own) {
  for (const ExtraLoss& loss : losses) {
    Tensor gradient = loss_.take_extra(ctx_, loss);
    if (!options_.record) continue;
    TESSERA_CHECK(loss.values.tape() == own.tape.get(), "the values of the loss '", loss.name,
                  "' are on no tape, so it would train nothing: compute them from what the piece was given, "
                  "and not inside of recompute()");
    own.losses.push_back(loss.values);
    own.losses.back().take();  // only its place is needed
    own.loss_gradients.push_back(std::move(gradient));
  }
}

Stage::Kept& Stage::kept(int chunk, int micro_batch) {
  const auto it = kept_.find({chunk, micro_batch});
  TESSERA_ENSURE(InternalError, it != kept_.end(), "backward of piece ", chunk, " of micro-batch ",
                 micro_batch, " without its forward");
  return it->second;
}

std::vector<Tensor> Stage::run_backward(int chunk, int micro_batch, std::vector<Tensor> grads, bool weights) {
  const Spans::Span span(backward_spans_);
  // Pieces pass on the empty tensors of an empty micro-batch.
  if (!computes(micro_batch)) return empty_tensors(ctx_, inputs(chunk, micro_batch));
  Kept& own = kept(chunk, micro_batch);
  if (own.last) grads = {own.upstream ? own.upstream : loss_.upstream(micro_batch)};
  std::ranges::move(own.losses, std::back_inserter(own.outputs));
  std::ranges::move(own.loss_gradients, std::back_inserter(grads));
  own.losses.clear();
  own.loss_gradients.clear();
  own.tape->on_gradient_ready(options_.on_gradient_ready);
  own.tape->backward(ctx_, own.outputs, std::move(grads),
                     weights ? Tape::WeightGradients::immediate : Tape::WeightGradients::deferred);
  std::vector<Tensor> results = input_gradients(chunk, micro_batch, own);
  if (weights) {
    kept_.erase({chunk, micro_batch});
  } else {
    own.inputs.clear();
    own.outputs.clear();
  }
  return results;
}

std::vector<Tensor> Stage::input_gradients(int chunk, int micro_batch, Kept& own) const {
  std::vector<Tensor> grads;
  for (const Var& input : own.inputs) grads.push_back(own.tape->take_grad(input));
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i]) {  // nothing of this piece depends on the value, and nobody behind it does
      const Port port = inputs(chunk, micro_batch).at(i);
      grads[i] = zeros(ctx_, port.shape, port.dtype);
    } else if (!grads[i].is_contiguous()) {
      grads[i] = ops::contiguous(ctx_, grads[i]);
    }
  }
  return grads;
}

}  // namespace tessera
