/// Gradients that wait for their factor, tapes that wait for a gradient.

#include "engine/open_calls.hpp"

#include "engine/passes.hpp"
#include "engine/shard_flow.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

LossPlan::Kind of(Engine::Output output) {
  return output == Engine::Output::logits          ? LossPlan::Kind::caller
         : output == Engine::Output::sample_logits ? LossPlan::Kind::samples
                                                   : LossPlan::Kind::per_token;
}

/// Rows of a micro-batch of n samples, [seq * n, width] or [seq * n] of the positions held, into fp32
/// `result`, [n, seq, width] and the like of all.
void copy_batch_major(const ExecCtx& ctx, const ContextParallel& context, const Tensor& rows,
                      const Tensor& result) {
  Tensor value = ops::contiguous(ctx, rows);
  if (value.dtype() != DType::f32) value = ops::cast(ctx, value, DType::f32);
  const std::int64_t n = result.size(0), held = rows.size(0) / n, width = rows.numel() / rows.size(0);
  const std::int64_t seq = held * context.size();
  value = gather_context(ctx, context, context.part(seq), value.view({held, n, width}));
  ops::copy(ctx, value.transpose(0, 1), result.view({n, seq, width}));
}

Tensor batch_major(const ExecCtx& ctx, const ContextParallel& context, const Tensor& rows,
                   const Shape& shape) {
  const Tensor result = Tensor::empty(ctx, shape, DType::f32);
  copy_batch_major(ctx, context, rows, result);
  return result;
}

/// The way back for a gradient [n, seq, width] or the like of all positions: of `rows`, still in fp32, times
/// `factor`.
Tensor position_major(const ExecCtx& ctx, const ContextParallel& context, const Tensor& gradient,
                      const Tensor& rows, float factor) {
  TESSERA_CHECK_EQ(rows.numel() * context.size(), gradient.numel(), "elements of the upstream gradient");
  const std::int64_t n = gradient.size(0), held = rows.size(0) / n, width = rows.numel() / rows.size(0);
  const std::int64_t seq = held * context.size();
  const Tensor result = Tensor::empty(ctx, {held, n, width}, DType::f32);
  for (const auto& run : context.part(seq).runs())
    ops::copy(ctx, gradient.view({n, seq, width}).narrow(1, run.whole, run.count).transpose(0, 1),
              result.narrow(0, run.held, run.count));
  if (factor != 1.0f) ops::axpby(ctx, factor, result, 0.0f, result);
  return result.view(rows.shape());
}

Tensor finish_gradient(const ExecCtx& ctx, Tensor gradient, const Tensor& loss_scale, DType dtype) {
  if (loss_scale) ops::scale_by(ctx, gradient, loss_scale);
  return dtype == DType::f32 ? gradient : ops::cast(ctx, gradient, dtype);
}

/// While the caller's own code runs inside of a call, its time is the caller's.
class CallersTurn {
 public:
  CallersTurn(FlightRecorder* flight, const char* call) : flight_(flight), call_(call) {
    if (flight_ != nullptr) flight_->close_call();
  }
  ~CallersTurn() {
    if (flight_ != nullptr) flight_->open_call(call_);
  }
  CallersTurn(const CallersTurn&) = delete;
  CallersTurn& operator=(const CallersTurn&) = delete;

 private:
  FlightRecorder* flight_;
  const char* call_;
};

}  // namespace

OpenCall::State::~State() {
  if (engine == nullptr) return;
  engine->open_calls_.erase(this);
  if (!aside && engine->params_->gradient().call_is_closed()) engine->params_->gradient().drop_call();
}

OpenForward::State::~State() {
  if (engine != nullptr) engine->open_forwards_.erase(this);
}

double OpenCall::loss() const { return state_ ? state_->loss : 0; }

void OpenCall::add(double factor) {
  TESSERA_CHECK(state_ && state_->engine,
                "this call was added before, or update() was called since, or discard() or set_frozen()");
  state_->engine->add(*state_, factor);
}

void OpenForward::backward(const Tensor& upstream) {
  TESSERA_CHECK(state_ && state_->engine, "backward() needs a forward() of an engine that is still there");
  state_->engine->backward(*state_, upstream);
}

/// The call whose gradient is in the buckets.
OpenCall Engine::opened(double loss) {
  OpenCall call;
  call.state_ = std::make_shared<OpenCall::State>(*this, loss);
  open_calls_.insert(call.state_.get());
  return call;
}

OpenCall Engine::open_call(const Batch& batch) {
  const FlightCall open(ctx_.stream->flight(), "Engine::open_call()");
  const PassesUnderWay passes = launch_passes(batch);
  OpenCall call = opened(0);
  call.state_->loss = read_loss(passes);
  return call;
}

OpenCall Engine::open_call(const Batch& given, Output output, const LossFunction& loss) {
  const FlightCall open(ctx_.stream->flight(), "Engine::open_call()");
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  const Batch batch = agreed(given, "Engine::open_call()", output == Output::token_losses);
  std::unique_ptr<Stage> stage;
  const auto gradient = [&](int micro_batch, const Tensor& value) {
    const Part samples = stage->samples(micro_batch);
    const Tensor seen =
        batch_major(ctx_, context(), value, output_shape(*model_, output, samples.count, batch.seq_length));
    const Tensor grad = [&] {
      const CallersTurn turn(ctx_.stream->flight().get(), "Engine::open_call()");
      return loss(micro_batch, samples, seen);
    }();
    TESSERA_CHECK(grad && grad.dtype() == DType::f32 && grad.shape() == seen.shape(),
                  "the gradient of a loss by outputs of shape ", seen.shape(), " has the shape ",
                  grad.shape(), " and dtype ", grad.dtype());
    const float share =
        static_cast<float>(samples.count) / static_cast<float>(samples_of_all(batch, mesh_->shape().dp));
    return finish_gradient(ctx_, position_major(ctx_, context(), grad, value, share),
                           optimizer_->loss_scale(), value.dtype());
  };
  stage = make_stage(batch, LossPlan::outputs(of(output), gradient), {});
  begin_call(stage->computed_micro_batches());
  run(*stage, false);
  params_->gradient().close_call();
  count_samples(batch);
  return opened(0);
}

void Engine::add(OpenCall::State& call, double factor) {
  if (call.aside) {
    params_->gradient().add_set_aside(call.aside, factor);
  } else {
    params_->gradient().add_call(factor);
  }
  factors_.push_back(factor);
  open_calls_.erase(&call);
  call.engine = nullptr;
  call.aside = {};
}

/// Gradients in the buckets make room for the next call's.
void Engine::begin_call(int micro_batches) {
  for (OpenCall::State* call : open_calls_) {
    if (!call->aside) call->aside = params_->gradient().set_call_aside();
  }
  if (flow_) flow_->abandon();
  params_->gradient().begin_call(
      [&](const Parameter& parameter) { return model_->pieces_using(parameter) * micro_batches; });
}

/// What these were computed from has changed, or is gone.
void Engine::forget_calls() {
  for (OpenCall::State* call : open_calls_) {
    call->engine = nullptr;
    call->aside = {};
  }
  open_calls_.clear();
  for (OpenForward::State* forward : open_forwards_) forward->forget();
}

OpenForward Engine::forward(const Batch& given, Output output, bool recorded) {
  const FlightCall open(ctx_.stream->flight(), "Engine::forward()");
  TESSERA_CHECK(options_.trainable || !recorded, "this engine was made for inference (trainable = false)");
  TESSERA_CHECK(output != Output::sample_logits || model_->sample_classes() > 0,
                "logits of whole samples were asked for, and the model has no head for these");
  const char* call = recorded ? "Engine::forward()" : "Engine::forward() without tapes";
  const auto kept =
      std::make_shared<OpenForward::State>(*this, agreed(given, call, output == Output::token_losses));
  kept->output = output;
  open_forwards_.insert(kept.get());
  kept->stage =
      make_stage(kept->batch, LossPlan::outputs(of(output)), {.training = recorded, .record = recorded});
  run(*kept->stage, true);
  OpenForward result;
  result.output = outputs_of(*kept->stage, kept->batch, output);
  if (!recorded) return result;
  const bool beside = output == Output::sample_logits && !model_->reads_whole_samples();
  if (!beside) count_samples(kept->batch);
  kept->number = ++forwards_;
  result.state_ = kept;
  return result;
}

Tensor Engine::outputs_of(Stage& stage, const Batch& batch, Output output) const {
  if (!holds_head()) return {};
  Tensor result =
      Tensor::empty(ctx_, output_shape(*model_, output, batch.batch, batch.seq_length), DType::f32);
  for (int i = 0; i < stage.full_micro_batches(); ++i) {
    const Part samples = stage.samples(i);
    copy_batch_major(ctx_, context(), stage.loss().outputs()[static_cast<std::size_t>(i)],
                     result.narrow(0, samples.begin, samples.count));
  }
  return result;
}

Shape output_shape(const Model& model, Engine::Output output, std::int64_t samples, std::int64_t seq_length) {
  const bool losses = output == Engine::Output::token_losses;
  if (model.reads_whole_samples() || output == Engine::Output::sample_logits)
    return losses ? Shape{samples} : Shape{samples, model.sample_classes()};
  return losses ? Shape{samples, seq_length} : Shape{samples, seq_length, model.vocab_size()};
}

void Engine::check_upstream(const OpenForward::State& forward, const Tensor& upstream) const {
  TESSERA_CHECK(forward.stage,
                "backward() needs a forward() that was not used or dropped, since the last update()");
  const Batch& batch = forward.batch;
  if (!holds_head() || batch.batch == 0) return;
  TESSERA_CHECK(upstream, "backward() needs the gradient of what forward() returned on this rank");
  const Shape shape = output_shape(*model_, forward.output, batch.batch, batch.seq_length);
  TESSERA_CHECK(upstream.dtype() == DType::f32 && upstream.shape() == shape, "upstream gradient of shape ",
                upstream.shape(), " and dtype ", upstream.dtype(), " for an output of shape ", shape, ": ",
                batch.batch, " samples of ", batch.seq_length, " positions");
}

void Engine::backward(OpenForward::State& forward, const Tensor& upstream) {
  const FlightCall open(ctx_.stream->flight(), "Engine::backward()");
  std::exception_ptr failure;
  try {
    check_upstream(forward, upstream);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  agree_on_backward(*mesh_, forward.number, upstream, failure);
  Stage& stage = *forward.stage;
  const Batch& batch = forward.batch;
  if (holds_head() && batch.batch > 0) {
    // 1 where all data ranks have equally many: finish_call() below divides by their number.
    const std::int64_t dp = mesh_->shape().dp, whole = samples_of_all(batch, mesh_->shape().dp);
    const float weight = static_cast<float>(batch.batch * dp) / static_cast<float>(whole);
    for (int i = 0; i < stage.full_micro_batches(); ++i) {
      const Part samples = stage.samples(i);
      const Tensor& value = stage.loss().outputs()[static_cast<std::size_t>(i)];
      const Tensor part = upstream.narrow(0, samples.begin, samples.count);
      stage.loss().set_upstream(i, finish_gradient(ctx_, position_major(ctx_, context(), part, value, weight),
                                                   optimizer_->loss_scale(), value.dtype()));
    }
  }
  begin_call(stage.computed_micro_batches());
  if (stage.micro_batches() > 0) {
    Schedule backwards = schedule(stage.micro_batches(), false);
    for (auto& column : backwards.actions)
      std::erase_if(column, [](const Action& a) { return a.kind == Action::Kind::forward; });
    run(stage, backwards);
  }
  forward.forget();
  params_->gradient().finish_call(1.0 / mesh_->shape().dp);
  factors_.push_back(1.0);
}

}  // namespace tessera
