#include "engine/stage.hpp"

#include <algorithm>

#include "tessera/autograd/functions.hpp"
#include "tessera/device/trace.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
Stage::Stage(const ExecCtx& ctx, Model& model, const Batch& batch, StageOptions options)
    : ctx_(ctx), model_(model), batch_(batch), options_(std::move(options)) {
  const std::int64_t size = options_.micro_batch_size;
  const std::int64_t count =
      options_.micro_batches > 0 ? options_.micro_batches : (batch.batch + size - 1) / size;
  inputs_.resize(static_cast<std::size_t>(batch.batch > 0 ? count : 0));
}

int Stage::full_micro_batches() const {
  return static_cast<int>(std::min<std::int64_t>(micro_batches(), batch_.batch));
}

Part Stage::samples(int micro_batch) const {
  if (options_.micro_batches > 0) return part_of(batch_.batch, micro_batch, micro_batches());
  const std::int64_t size = options_.micro_batch_size, first = micro_batch * size;
  return {first, std::min(size, batch_.batch - first)};
}

const MicroBatch& Stage::input_of(int micro_batch) {
  auto& input = inputs_[static_cast<std::size_t>(micro_batch)];
  if (!input) {
    const TraceSpan span(*ctx_.stream, [] { return Work{WorkKind::data, "micro-batch"}; });
    const Part part = samples(micro_batch);
    Batch piece = slice(batch_, part.begin, part.count);
    piece.sample0 += options_.samples_before;
    input = std::make_unique<MicroBatch>(to_micro_batch(ctx_, piece));
  }
  return *input;
}

StageProgram::Boundary Stage::boundary(int micro_batch) const {
  const auto [shape, dtype] = model_.boundary(samples(micro_batch).count, batch_.seq_length);
  return {shape, dtype};
}

Tensor Stage::forward(int chunk, int micro_batch, Tensor input) {
  const Spans::Span span(forward_spans_);
  if (samples(micro_batch).count == 0) return model_.is_last(chunk) ? Tensor() : nothing(micro_batch);
  const MicroBatch& micro = input_of(micro_batch);
  Kept local;
  Tape* tape = options_.record ? local.tape.get() : nullptr;
  const Forward forward{
      .exec = ctx_, .input = micro, .tape = tape, .training = options_.training, .step = options_.step};
  local.first = !input;
  if (input) local.input = tape ? tape->input(std::move(input), true) : Var(std::move(input));
  if (loss_gradient_ != 0.0) {
    local.upstream = Tensor::empty(ctx_, {micro.labels.numel()}, DType::f32);
    ops::fill_constant(ctx_, local.upstream, static_cast<float>(loss_gradient_));
    if (loss_scale_) ops::scale_by(ctx_, local.upstream, loss_scale_);
  }
  const bool known = !options_.record || loss_gradient_ != 0.0;
  const auto output = known ? options_.output : Model::Output::logits;
  local.output = model_.run_piece(forward, chunk, local.input, output, local.upstream);
  local.input.take();  // the tape keeps what it needs of it
  local.last = model_.is_last(chunk);
  Tensor result;
  if (!local.last) {
    result = local.output.take();
  } else {
    if (!known && options_.output == Model::Output::losses)
      local.output = cross_entropy(ctx_, std::move(local.output), micro.labels);
    if (options_.loss_gradient) {
      local.upstream = options_.loss_gradient(micro_batch, local.output.value());
    } else if (options_.keep_outputs) {
      outputs_.resize(inputs_.size());
      outputs_[static_cast<std::size_t>(micro_batch)] = local.output.value();
    } else {
      add_up(local.output.value());
    }
  }
  if (options_.record) kept_.emplace(std::pair(chunk, micro_batch), std::move(local));
  return result;
}

void Stage::add_up(const Tensor& losses) {
  if (loss_sum_) {
    ops::add_sum(ctx_, losses, loss_sum_);
  } else {
    loss_sum_ = ops::sum(ctx_, losses);
  }
}

void Stage::set_upstream(int micro_batch, Tensor gradient) {
  upstream_.resize(inputs_.size());
  upstream_[static_cast<std::size_t>(micro_batch)] = std::move(gradient);
}

Stage::Kept& Stage::kept(int chunk, int micro_batch) {
  const auto it = kept_.find({chunk, micro_batch});
  TESSERA_ENSURE(InternalError, it != kept_.end(), "backward of piece ", chunk, " of micro-batch ",
                 micro_batch, " without its forward");
  return it->second;
}

Tensor Stage::nothing(int micro_batch) const {
  const auto [shape, dtype] = boundary(micro_batch);
  return Tensor::empty(ctx_, shape, dtype);
}

Tensor Stage::backward(int chunk, int micro_batch, Tensor grad, bool weights) {
  const Spans::Span span(backward_spans_);
  // Pieces pass on the empty tensor of an empty micro-batch; the first one's is taken by nobody.
  if (samples(micro_batch).count == 0) return nothing(micro_batch);
  Kept& own = kept(chunk, micro_batch);
  if (own.last) grad = own.upstream ? own.upstream : upstream_.at(static_cast<std::size_t>(micro_batch));
  own.tape->on_gradient_ready(options_.on_gradient_ready);
  own.tape->backward(ctx_, own.output, std::move(grad),
                     weights ? Tape::WeightGradients::immediate : Tape::WeightGradients::deferred);
  Tensor result = !own.first ? own.tape->take_grad(own.input) : Tensor();
  if (weights) {
    kept_.erase({chunk, micro_batch});
  } else {
    own.input = own.output = Var();
  }
  return result;
}

void Stage::weight_gradient(int chunk, int micro_batch) {
  const Spans::Span span(backward_spans_);
  if (samples(micro_batch).count == 0) return;
  kept(chunk, micro_batch).tape->run_weight_gradients(ctx_);
  kept_.erase({chunk, micro_batch});
}

}  // namespace tessera
