#include "tessera/engine/engine.hpp"

#include <chrono>

#include "tessera/nn/models/decoder.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
namespace {

class Timer {
 public:
  explicit Timer(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Timer() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

Tensor constant(const ExecCtx& ctx, std::int64_t n, float value) {
  Tensor t = Tensor::empty(ctx, {n}, DType::f32);
  ops::fill_constant(ctx, t, value);
  return t;
}

double read(const ExecCtx& ctx, const Tensor& one_double) {
  ctx.stream->synchronize();
  double value = 0.0;
  one_double.copy_to_host(&value);
  return value;
}

}  // namespace

EngineOptions EngineOptions::from(const Config& config) {
  return {.optimizer = config.optimizer,
          .lr_schedule = config.lr_schedule,
          .steps = config.training.steps,
          .micro_batch_size = config.training.micro_batch_size,
          .compute = numerics_of(config.training).compute,
          .max_skipped_steps = config.training.max_skipped_steps};
}

Engine::Engine(std::unique_ptr<Model> model, const EngineOptions& options, ExecCtx ctx)
    : ctx_(std::move(ctx)),
      options_(options),
      model_(std::move(model)),
      params_(std::make_unique<ParamStore>(ctx_, model_->parameters(),
                                           ParamStoreOptions{options.compute, options.trainable})),
      optimizer_(options.trainable ? std::make_unique<Optimizer>(ctx_, *params_, options.optimizer)
                                   : nullptr),
      lr_schedule_(options.lr_schedule, options.optimizer.lr, options.steps),
      weight_decay_schedule_(options.lr_schedule, options.optimizer.weight_decay, options.steps) {}

Engine::~Engine() = default;

StepReport Engine::step(const Batch& batch) {
  times_ = {};
  StepReport result;
  result.loss = forward_backward(batch);
  result.update = update();
  result.tokens = batch.batch * batch.seq_length;
  result.times = times_;
  return result;
}

double Engine::forward_backward(const Batch& batch, double factor) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  check_batch(batch, true);
  const std::int64_t targets = count_targets(batch);
  TESSERA_CHECK(targets > 0, "no label of this batch counts: all ", batch.labels.size(), " are -100");
  params_->begin_call();
  double loss = 0.0;
  for_each_micro_batch(batch, [&](std::int64_t, const MicroBatch& input) {
    const Tensor upstream = constant(ctx_, input.labels.numel(), 1.0f / static_cast<float>(targets));
    Tape tape;
    Var losses;
    {
      const Timer timer(times_.forward);
      losses = model_->loss(context(input, &tape, true), upstream);
      loss += read(ctx_, ops::sum(ctx_, losses.value()));
    }
    const Timer timer(times_.backward);
    tape.backward(ctx_, losses, upstream);
  });
  params_->finish_call(factor);
  samples_this_step_ += batch.batch;
  return loss / static_cast<double>(targets);
}

Tensor Engine::forward(const Batch& batch, Output output) {
  TESSERA_CHECK(kept_.empty(), "forward() was called again before backward() or discard()");
  check_batch(batch, output == Output::token_losses);
  const std::int64_t width = output == Output::logits ? model_->vocab_size() : 1;
  Tensor result = Tensor::empty(ctx_, {batch.batch, batch.seq_length, width}, DType::f32);
  for_each_micro_batch(batch, [&](std::int64_t first, MicroBatch input) {
    Kept kept{first, std::move(input), std::make_unique<Tape>(), {}};
    kept.output = model_->forward(context(kept.input, kept.tape.get(), true));
    if (output == Output::token_losses)
      kept.output = cross_entropy(ctx_, std::move(kept.output), kept.input.labels);
    Tensor value = ops::contiguous(ctx_, kept.output.value());
    if (value.dtype() != DType::f32) value = ops::cast(ctx_, value, DType::f32);
    ops::copy(ctx_, value.view({batch.seq_length, kept.input.batch, width}).transpose(0, 1),
              result.narrow(0, first, kept.input.batch));
    kept_.push_back(std::move(kept));
  });
  samples_this_step_ += batch.batch;
  return output == Output::logits ? result : result.view({batch.batch, batch.seq_length});
}

void Engine::backward(const Tensor& upstream) {
  TESSERA_CHECK(!kept_.empty(), "backward() needs a forward() before it");
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  const MicroBatch& last = kept_.back().input;
  const std::int64_t samples = kept_.back().first + last.batch, rows = samples * last.seq_length;
  TESSERA_CHECK(
      upstream.dtype() == DType::f32 && upstream.size(0) == samples && upstream.size(1) == last.seq_length,
      "upstream gradient of shape ", upstream.shape(), " and dtype ", upstream.dtype(), " for an output of ",
      samples, " samples of ", last.seq_length, " positions");
  const std::int64_t width = upstream.numel() / rows;
  const Tensor whole = upstream.view({samples, last.seq_length, width});
  params_->begin_call();
  for (Kept& kept : kept_) {
    const Tensor& value = kept.output.value();
    TESSERA_CHECK_EQ(value.numel(), kept.input.batch * last.seq_length * width, "upstream gradient");
    Tensor grad = ops::contiguous(ctx_, whole.narrow(0, kept.first, kept.input.batch).transpose(0, 1))
                      .view(value.shape());
    if (value.dtype() != DType::f32) grad = ops::cast(ctx_, grad, value.dtype());
    kept.tape->backward(ctx_, kept.output, std::move(grad));
    kept = Kept{};
  }
  kept_.clear();
  params_->finish_call(1.0);
}

void Engine::discard() {
  kept_.clear();
  params_->discard_gradients();
  samples_this_step_ = 0;
}

UpdateResult Engine::update() {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  TESSERA_CHECK(kept_.empty(), "update() was called between forward() and backward()");
  const Timer timer(times_.update);
  const std::int64_t updates = optimizer_->updates();
  const double lr = lr_schedule_.at(updates);
  const StepResult done = optimizer_->step(lr, weight_decay_schedule_.at(updates));
  ++steps_done_;
  samples_this_step_ = 0;
  skipped_in_a_row_ = done.skipped ? skipped_in_a_row_ + 1 : 0;
  steps_skipped_ += done.skipped ? 1 : 0;
  TESSERA_ENSURE(
      TrainingError, skipped_in_a_row_ < options_.max_skipped_steps, "training stopped at step ", steps_done_,
      ": the gradient was not finite ", skipped_in_a_row_,
      " steps in a row. The weights are those of the last good step. Lower optimizer.lr, lengthen the "
      "warm-up, or check the data");
  return {done.grad_norm, lr, done.skipped};
}

double Engine::evaluate(const Batch& batch) {
  check_batch(batch, true);
  double loss = 0.0;
  for_each_micro_batch(batch, [&](std::int64_t, const MicroBatch& input) {
    const Var losses = model_->loss(context(input, nullptr, false), Tensor());
    loss += read(ctx_, ops::sum(ctx_, losses.value()));
  });
  return loss / static_cast<double>(std::max<std::int64_t>(1, count_targets(batch)));
}

void Engine::set_progress(std::int64_t steps_done, std::int64_t steps_skipped) {
  steps_done_ = steps_done;
  steps_skipped_ = steps_skipped;
}

Forward Engine::context(const MicroBatch& input, Tape* tape, bool training) const {
  return {.exec = ctx_,
          .input = input,
          .tape = tape,
          .training = training,
          .step = static_cast<std::uint32_t>(steps_done_)};
}

template <typename Fn>
void Engine::for_each_micro_batch(const Batch& batch, Fn&& fn) {
  const std::int64_t size = options_.micro_batch_size > 0 ? options_.micro_batch_size : batch.batch;
  for (std::int64_t first = 0; first < batch.batch; first += size) {
    Batch piece = slice(batch, first, std::min(size, batch.batch - first));
    piece.sample0 += samples_this_step_;
    fn(first, to_micro_batch(ctx_, piece));
  }
}

void Engine::check_batch(const Batch& batch, bool needs_labels) const {
  validate(batch, model_->vocab_size());
  TESSERA_CHECK(batch.batch > 0 && batch.seq_length > 0, "an empty batch: ", batch.batch, " samples of ",
                batch.seq_length, " tokens");
  TESSERA_CHECK(batch.seq_length <= model_->max_positions(), "a sequence of ", batch.seq_length,
                " tokens is longer than the model's max_positions ", model_->max_positions());
  TESSERA_CHECK(!needs_labels || !batch.labels.empty(), "this batch has no labels");
}

}  // namespace tessera
