#include "tessera/engine/engine.hpp"

#include <algorithm>
#include <cmath>

#include "engine/passes.hpp"
#include "engine/stage.hpp"
#include "tessera/base/config.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/nn/models/decoder.hpp"
#include "tessera/ops/backends.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {

namespace {

LossScale loss_scale_of(const TrainingConfig& training) {
  if (training.precision != Precision::fp16) return {};
  if (training.loss_scale) return {.first = static_cast<float>(*training.loss_scale)};
  return {.first = static_cast<float>(training.initial_loss_scale),
          .rule = {.smallest = static_cast<float>(training.min_loss_scale),
                   .growth_interval = static_cast<std::int32_t>(training.loss_scale_window),
                   .hysteresis = static_cast<std::int32_t>(training.hysteresis)}};
}

std::function<bool(const Parameter&)> frozen_by(const ParamGroups& groups) {
  if (groups.groups.empty()) return nullptr;
  return [groups](const Parameter& parameter) { return groups.freezes(parameter); };
}

Model::Output of(Engine::Output output) {
  return output == Engine::Output::logits ? Model::Output::logits : Model::Output::losses;
}

/// Rows of a micro-batch, [seq * n, width] or [seq * n], into fp32 `result` [n, seq, width].
void copy_batch_major(const ExecCtx& ctx, const Tensor& rows, const Tensor& result) {
  Tensor value = ops::contiguous(ctx, rows);
  if (value.dtype() != DType::f32) value = ops::cast(ctx, value, DType::f32);
  ops::copy(ctx, value.view({result.size(1), result.size(0), result.size(2)}).transpose(0, 1), result);
}

Tensor batch_major(const ExecCtx& ctx, const Tensor& rows, std::int64_t samples, std::int64_t seq_length) {
  const Tensor result =
      Tensor::empty(ctx, {samples, seq_length, rows.numel() / (samples * seq_length)}, DType::f32);
  copy_batch_major(ctx, rows, result);
  return rows.rank() > 1 ? result : result.view({samples, seq_length});
}

/// The way back for a gradient [n, seq, width] or [n, seq] of `rows`, still in fp32, times `factor`.
Tensor position_major(const ExecCtx& ctx, const Tensor& gradient, const Tensor& rows, float factor) {
  const std::int64_t n = gradient.size(0), seq = gradient.size(1), width = gradient.numel() / (n * seq);
  TESSERA_CHECK_EQ(rows.numel(), n * seq * width, "elements of the upstream gradient");
  const Tensor result = Tensor::empty(ctx, {seq, n, width}, DType::f32);
  ops::copy(ctx, gradient.view({n, seq, width}).transpose(0, 1), result);
  if (factor != 1.0f) ops::axpby(ctx, factor, result, 0.0f, result);
  return result.view(rows.shape());
}

/// Samples of all data ranks together.
std::int64_t samples_of_all(const Batch& batch, int data_ranks) {
  return batch.global_batch > 0 ? batch.global_batch : batch.batch * data_ranks;
}

/// What is not a number has no sign to print either.
double without_sign_of_nan(double value) { return std::isnan(value) ? std::nan("") : value; }

Tensor finish_gradient(const ExecCtx& ctx, Tensor gradient, const Tensor& loss_scale, DType dtype) {
  if (loss_scale) ops::scale_by(ctx, gradient, loss_scale);
  return dtype == DType::f32 ? gradient : ops::cast(ctx, gradient, dtype);
}

/// Only first and last stage add up the gradients of a table that both hold.
void check_ties(const ProcessMesh& mesh, const ParamStore& params) {
  for (const Parameter* p : params.parameters()) {
    TESSERA_CHECK(!p->traits().tied || mesh.embedding().size() > 1, "parameter ", p->name(),
                  " is tied to a copy on another pipeline stage, but this stage (", mesh.coordinates().pp,
                  " of ", mesh.shape().pp,
                  ") is neither the first nor the last of several: give it a weight of its own");
  }
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

/// A batch whose tapes wait for a gradient.
struct Engine::Forwarded {
  Batch batch;
  std::unique_ptr<Stage> stage;
};

/// A step whose result was not read yet.
struct Engine::StepUnderWay {
  PassesUnderWay passes;
  Spans update;
  StepReport report;
  std::vector<ExecutedAction> executed = {};
  std::uint64_t launched = 0;  ///< operations of the flight recorder so far
};

EngineOptions EngineOptions::from(const Config& config) {
  EngineOptions options{.optimizer = config.optimizer,
                        .lr_schedule = config.lr_schedule,
                        .steps = config.training.steps,
                        .micro_batch_size = config.training.micro_batch_size,
                        .compute = numerics_of(config.training).compute,
                        .loss_scale = loss_scale_of(config.training),
                        .max_skipped_steps = config.training.max_skipped_steps,
                        .cuda_graph = config.device.cuda_graph};
  options.layout.schedule = config.parallel.schedule;
  options.layout.chunks = pieces_per_stage(config.parallel);
  options.layout.zero_stage = static_cast<int>(config.parallel.zero_stage);
  return options;
}

Engine::Engine(std::unique_ptr<Model> model, const EngineOptions& options, ExecCtx ctx)
    : ctx_(std::move(ctx)),
      options_(options),
      mesh_(options.layout.mesh ? options.layout.mesh : ProcessMesh::self()),
      model_(std::move(model)),
      params_(std::make_unique<ParamStore>(
          ctx_, model_->parameters(),
          ParamStoreOptions{.compute = options.compute,
                            .split_main = options.optimizer.split_main_weights,
                            .trainable = options.trainable,
                            .groups = {.data = &(*mesh_)[Axis::dp],
                                       .tensor = &(*mesh_)[Axis::tp],
                                       .embedding = &mesh_->embedding(),
                                       .world = &mesh_->world(),
                                       .tensor_block = [mesh = mesh_.get()](int copies) -> Communicator& {
                                         return mesh->tp_block(copies);
                                       }},
                            .zero_stage = options.layout.zero_stage,
                            .bucket_elements = options.layout.bucket_elements,
                            .frozen = frozen_by(options.groups)})),
      optimizer_(options.trainable ? std::make_unique<Optimizer>(ctx_, *params_, options.optimizer,
                                                                 options.loss_scale, options.groups)
                                   : nullptr),
      lr_schedule_(options.lr_schedule, options.optimizer.lr, options.steps),
      weight_decay_schedule_(options.lr_schedule, options.optimizer.weight_decay, options.steps),
      executor_(ctx_, (*mesh_)[Axis::pp]),
      graph_(options.cuda_graph != GraphUse::off && options.trainable && ctx_.device().is_cuda()
                 ? std::make_unique<StreamGraph>(ctx_.stream)
                 : nullptr) {
  ops::prepare_stream(ctx_);
  if (!ctx_.stream->flight()) ctx_.stream->set_flight(mesh_->world().flight());
  TESSERA_CHECK_EQ(model_->num_pieces(), options.layout.chunks,
                   "pieces of the model on this rank, chunks of the layout");
  check_ties(*mesh_, *params_);
}

Engine::~Engine() = default;

Engine::StreamEnd::~StreamEnd() { ops::forget_stream(ctx); }

StepReport Engine::step(const Batch& batch) {
  const FlightCall open(ctx_.stream->flight(), "Engine::step()");
  TESSERA_CHECK(steps_.empty(), "step() was called while ", steps_.size(),
                " steps are under way: finish_step() takes their results");
  launch_step(batch);
  return finish_step();
}

BatchCall Engine::about(BatchCall call) const {
  call.step = steps_done_;
  call.frozen_hash = frozen_hash_;
  call.frozen = [this] {
    std::string names;
    for (const auto& [name, told] : frozen_) names += told + "\n";
    return names;
  };
  return call;
}

void Engine::agree_on(Batch& batch, BatchCall call, bool needs_labels) const {
  try {
    check_batch(batch, needs_labels);
  } catch (const Error&) {
    if (mesh_->world().size() == 1) throw;
    call.failure = std::current_exception();
  }
  agree(*mesh_, batch, about(std::move(call)));
}

Batch Engine::agreed(const Batch& batch, const char* call, bool needs_labels) const {
  Batch result = batch;
  if (batch.global_targets == Batch::kUnknown) {
    agree_on(result, {.name = call}, needs_labels);
  } else {
    check_batch(batch, needs_labels);
  }
  return result;
}

void Engine::launch_step(const Batch& batch) {
  const FlightCall open(ctx_.stream->flight(), "Engine::launch_step()");
  const std::vector<AxisTraffic> before = traffic();
  auto step = std::make_unique<StepUnderWay>(launch_passes(batch), Spans(ctx_.stream), StepReport{});
  if (step->passes.targets == 0) {
    params_->drop_call();
    throw DataError(detail::concat("no label of this batch counts: all are ", kIgnoredLabel,
                                   ", so a step would only decay weights; check the data"));
  }
  params_->add_call(1.0);
  {
    const Spans::Span span(step->update);
    launch_update();
  }
  step->executed = executor_.executed();
  step->report.tokens = batch.batch * batch.seq_length * mesh_->shape().dp;
  step->report.traffic = since(before);
  if (const auto& flight = ctx_.stream->flight()) step->launched = flight->next();
  steps_.push_back(std::move(step));
}

StepReport Engine::finish_step() {
  const FlightCall open(ctx_.stream->flight(), "Engine::finish_step()");
  TESSERA_CHECK(!steps_.empty(), "finish_step() needs a launch_step() before it");
  const std::unique_ptr<StepUnderWay> step = std::move(steps_.front());
  steps_.pop_front();
  StepReport result = std::move(step->report);
  const std::vector<AxisTraffic> before = traffic();
  result.loss = without_sign_of_nan(read_loss(step->passes));
  const std::vector<AxisTraffic> more = since(before);
  for (std::size_t i = 0; i < more.size(); ++i) {
    result.traffic[i].bytes_sent += more[i].bytes_sent;
    result.traffic[i].wait_s += more[i].wait_s;
  }
  result.update = finish_update(scheduled_lr());
  if (const auto& flight = ctx_.stream->flight()) flight->reached(step->launched);
  result.times.forward = step->passes.forward.seconds();
  result.times.backward = step->passes.backward.seconds();
  result.times.update = step->update.seconds();
  result.times.bubble = stalled_s(step->executed);
  return result;
}

double Engine::forward_backward(const Batch& batch, double factor) {
  const FlightCall open(ctx_.stream->flight(), "Engine::forward_backward()");
  const PassesUnderWay passes = launch_passes(batch);
  params_->add_call(factor);
  factors_.push_back(factor);
  return read_loss(passes);
}

Engine::Call Engine::open_call(const Batch& batch) {
  const FlightCall open(ctx_.stream->flight(), "Engine::open_call()");
  const PassesUnderWay passes = launch_passes(batch);
  calls_[++last_call_] = Tensor();
  return {last_call_, read_loss(passes)};
}

Engine::Call Engine::open_call(const Batch& given, Output output, const LossFunction& loss) {
  const FlightCall open(ctx_.stream->flight(), "Engine::open_call()");
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  const Batch batch = agreed(given, "Engine::open_call()", output == Output::token_losses);
  std::unique_ptr<Stage> stage;
  const auto gradient = [&](int micro_batch, const Tensor& value) {
    const Part samples = stage->samples(micro_batch);
    const Tensor seen = batch_major(ctx_, value, samples.count, batch.seq_length);
    const Tensor grad = [&] {
      const CallersTurn turn(ctx_.stream->flight().get(), "Engine::open_call()");
      return loss(micro_batch, samples, seen);
    }();
    TESSERA_CHECK(grad && grad.dtype() == DType::f32 && grad.shape() == seen.shape(),
                  "the gradient of a loss by outputs of shape ", seen.shape(), " has the shape ",
                  grad.shape(), " and dtype ", grad.dtype());
    const float share =
        static_cast<float>(samples.count) / static_cast<float>(samples_of_all(batch, mesh_->shape().dp));
    return finish_gradient(ctx_, position_major(ctx_, grad, value, share), optimizer_->loss_scale(),
                           value.dtype());
  };
  stage = make_stage(batch, {.output = of(output), .loss_gradient = gradient});
  begin_call(stage->full_micro_batches());
  run(*stage, false);
  params_->close_call();
  count_samples(batch);
  calls_[++last_call_] = Tensor();
  return {last_call_, 0.0};
}

void Engine::add_call(std::int64_t number, double factor) {
  const auto call = calls_.extract(number);
  TESSERA_CHECK(call, "call ", number,
                " was added or dropped before, or update() was called since, or set_frozen()");
  if (call.mapped()) {
    params_->add_set_aside(call.mapped(), factor);
  } else {
    params_->add_call(factor);
  }
  factors_.push_back(factor);
}

void Engine::drop_call(std::int64_t number) {
  const auto call = calls_.extract(number);
  if (call && !call.mapped()) params_->drop_call();
}

Tensor Engine::forward(const Batch& given, Output output) {
  const FlightCall open(ctx_.stream->flight(), "Engine::forward()");
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  auto next = std::make_unique<Forwarded>();
  next->batch = agreed(given, "Engine::forward()", output == Output::token_losses);
  const Batch& batch = next->batch;
  next->stage = make_stage(next->batch, {.output = of(output), .keep_outputs = true});
  run(*next->stage, true);
  count_samples(batch);
  Tensor result = outputs_of(*next->stage, batch, output);
  forwarded_[++forwards_] = std::move(next);
  return result;
}

Tensor Engine::predict(const Batch& given, Output output) {
  const FlightCall open(ctx_.stream->flight(), "Engine::predict()");
  const Batch batch = agreed(given, "Engine::predict()", output == Output::token_losses);
  const auto stage =
      make_stage(batch, {.output = of(output), .training = false, .record = false, .keep_outputs = true});
  run(*stage, true);
  return outputs_of(*stage, batch, output);
}

Tensor Engine::outputs_of(Stage& stage, const Batch& batch, Output output) const {
  if (!holds_head()) return {};
  const std::int64_t width = output == Output::logits ? model_->vocab_size() : 1;
  Tensor result = Tensor::empty(ctx_, {batch.batch, batch.seq_length, width}, DType::f32);
  for (int i = 0; i < stage.full_micro_batches(); ++i) {
    const Part samples = stage.samples(i);
    copy_batch_major(ctx_, stage.outputs()[static_cast<std::size_t>(i)],
                     result.narrow(0, samples.begin, samples.count));
  }
  return output == Output::logits ? result : result.view({batch.batch, batch.seq_length});
}

Engine::Forwarded& Engine::forwarded_for(std::int64_t number, const Tensor& upstream) const {
  const auto forwarded = forwarded_.find(number);
  TESSERA_CHECK(forwarded != forwarded_.end(),
                "backward() needs a forward() that was not used or dropped, since the last update()");
  const Batch& batch = forwarded->second->batch;
  if (!holds_head() || batch.batch == 0) return *forwarded->second;
  TESSERA_CHECK(upstream, "backward() needs the gradient of what forward() returned on this rank");
  TESSERA_CHECK(upstream.dtype() == DType::f32 && upstream.rank() >= 2 && upstream.size(0) == batch.batch &&
                    upstream.size(1) == batch.seq_length,
                "upstream gradient of shape ", upstream.shape(), " and dtype ", upstream.dtype(),
                " for an output of ", batch.batch, " samples of ", batch.seq_length, " positions");
  return *forwarded->second;
}

void Engine::backward(const Tensor& upstream, std::optional<std::int64_t> which) {
  const FlightCall open(ctx_.stream->flight(), "Engine::backward()");
  const std::int64_t number = which.value_or(forwards_);
  const Forwarded* forwarded = nullptr;
  std::exception_ptr failure;
  try {
    forwarded = &forwarded_for(number, upstream);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  agree_on_backward(*mesh_, number, upstream, failure);
  Stage& stage = *forwarded->stage;
  const Batch& batch = forwarded->batch;
  if (holds_head() && batch.batch > 0) {
    // 1 where all data ranks have equally many: finish_call() below divides by their number.
    const std::int64_t dp = mesh_->shape().dp, whole = samples_of_all(batch, mesh_->shape().dp);
    const float weight = static_cast<float>(batch.batch * dp) / static_cast<float>(whole);
    for (int i = 0; i < stage.full_micro_batches(); ++i) {
      const Part samples = stage.samples(i);
      const Tensor& value = stage.outputs()[static_cast<std::size_t>(i)];
      const Tensor part = upstream.narrow(0, samples.begin, samples.count);
      stage.set_upstream(i, finish_gradient(ctx_, position_major(ctx_, part, value, weight),
                                            optimizer_->loss_scale(), value.dtype()));
    }
  }
  begin_call(stage.full_micro_batches());
  if (stage.micro_batches() > 0) {
    Schedule backwards = schedule(stage.micro_batches(), false);
    for (auto& column : backwards.actions)
      std::erase_if(column, [](const Action& a) { return a.kind == Action::Kind::forward; });
    executor_.run(backwards, stage);
  }
  forwarded_.erase(number);
  params_->finish_call(1.0 / mesh_->shape().dp);
  factors_.push_back(1.0);
}

void Engine::drop_forward(std::int64_t number) { forwarded_.erase(number); }

void Engine::discard() {
  forwarded_.clear();
  calls_.clear();
  factors_.clear();
  params_->discard_gradients();
  samples_this_step_ = 0;
}

void Engine::check_can_update() const {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  TESSERA_CHECK(steps_.empty(), "update() was called while ", steps_.size(), " steps are under way");
}

UpdateResult Engine::update() {
  const FlightCall open(ctx_.stream->flight(), "Engine::update()");
  check_can_update();
  const std::int64_t updates = optimizer_->updates();
  const UpdateRates rates{lr_schedule_.at(updates), weight_decay_schedule_.at(updates)};
  agree_on_update(std::span(&rates, 1), factors_, mesh_->world());
  launch_update();
  return finish_update(scheduled_lr());
}

UpdateResult Engine::update(std::span<const UpdateRates> rates, bool agreed) {
  const FlightCall open(ctx_.stream->flight(), "Engine::update()");
  check_can_update();
  if (!agreed) agree_on_update(rates, factors_, mesh_->world());
  settle_trained();
  optimizer_->launch_step([&](std::int64_t) { return std::vector<UpdateRates>(rates.begin(), rates.end()); });
  after_update();
  return finish_update(rates.front().lr);
}

void Engine::launch_update() {
  settle_trained();
  optimizer_->launch_step([this](std::int64_t updates) {
    return UpdateRates{lr_schedule_.at(updates), weight_decay_schedule_.at(updates)};
  });
  after_update();
}

/// What these were computed from has changed.
void Engine::forget_calls() {
  forwarded_.clear();
  calls_.clear();
}

void Engine::after_update() {
  forget_calls();
  factors_.clear();
  ++steps_done_;
  samples_this_step_ = 0;
}

UpdateResult Engine::finish_update(double lr) {
  const StepResult done = optimizer_->finish_step();
  // While the loss scale can still fall, a gradient that overflowed only says that it was too large.
  const LossScaleRule& rule = options_.loss_scale.rule;
  const bool scale_falls = rule.growth_interval > 0 && done.loss_scale > static_cast<double>(rule.smallest);
  if (!done.skipped) skipped_in_a_row_ = 0;
  if (done.skipped && !scale_falls) ++skipped_in_a_row_;
  steps_skipped_ += done.skipped ? 1 : 0;
  TESSERA_ENSURE(
      TrainingError, skipped_in_a_row_ < options_.max_skipped_steps, "training stopped at step ",
      steps_done_ - static_cast<std::int64_t>(steps_.size()), ": the gradient was not finite ",
      skipped_in_a_row_,
      " steps in a row. The weights are those of the last good step. Lower optimizer.lr, lengthen the "
      "warm-up, or check the data");
  return {without_sign_of_nan(done.grad_norm), lr, done.skipped, done.loss_scale};
}

double Engine::evaluate(const Batch& batch) {
  const LossSum loss = evaluate_sum(batch);
  return loss.sum / std::max(1.0, loss.targets);
}

Engine::LossSum Engine::evaluate_sum(const Batch& given) {
  const FlightCall open(ctx_.stream->flight(), "Engine::evaluate()");
  const Batch batch = agreed(given, "Engine::evaluate()", true);
  const auto stage = make_stage(batch, {.output = Model::Output::losses, .training = false, .record = false});
  run(*stage, true);
  return {without_sign_of_nan(sum_over_data(HostCopy(ctx_, stage->loss_sum()).value<double>())),
          static_cast<double>(batch.global_targets)};
}

void Engine::set_progress(std::int64_t steps_done, std::int64_t steps_skipped) {
  steps_done_ = steps_done;
  steps_skipped_ = steps_skipped;
}

void Engine::set_trace(const std::shared_ptr<Trace>& trace) {
  ctx_.stream->set_trace(trace);
  host_.stream->set_trace(trace);
}

std::unique_ptr<Stage> Engine::make_stage(const Batch& batch, StageOptions options) {
  model_->reserve_positions(ctx_, position_count(batch));
  options.step = static_cast<std::uint32_t>(steps_done_);
  options.samples_before = samples_this_step_;
  options.micro_batch_size =
      options_.micro_batch_size > 0 ? options_.micro_batch_size : std::max<std::int64_t>(1, batch.batch);
  if (options_.micro_batches > 0) {
    // Only an interleaved pipeline needs a certain number of them; others leave out those without samples.
    const bool fixed = options_.layout.schedule == PipelineSchedule::interleaved;
    options.micro_batches = fixed ? options_.micro_batches : std::min(options_.micro_batches, batch.batch);
  }
  if (options.record)
    options.on_gradient_ready = [this](Parameter& parameter) { params_->gradient_ready(parameter); };
  return std::make_unique<Stage>(ctx_, *model_, batch, std::move(options));
}

void Engine::run(Stage& stage, bool forward_only) {
  if (stage.micro_batches() > 0) executor_.run(schedule(stage.micro_batches(), forward_only), stage);
}

void Engine::count_samples(const Batch& batch) {
  samples_this_step_ += samples_of_all(batch, mesh_->shape().dp);
}

Schedule Engine::schedule(int micro_batches, bool forward_only) const {
  return make_schedule(options_.layout.schedule, mesh_->shape().pp, options_.layout.chunks, micro_batches,
                       forward_only);
}

void Engine::begin_call(int micro_batches) {
  for (auto& [number, aside] : calls_) {
    if (!aside) aside = params_->set_call_aside();
  }
  params_->begin_call(
      [&](const Parameter& parameter) { return model_->pieces_using(parameter) * micro_batches; });
}

void Engine::check_batch(const Batch& batch, bool needs_labels) const {
  if (batch.batch == 0 && mesh_->shape().dp > 1) return;  // another data rank has samples
  validate(batch, model_->vocab_size(), model_->position_limit());
  model_->check_length(batch.seq_length);
  TESSERA_CHECK(!needs_labels || !batch.labels.empty(), "this batch has no labels");
}

bool Engine::holds_head() const { return model_->is_last(model_->num_pieces() - 1); }

double Engine::sum_over_data(double value) const {
  if (mesh_->world().size() == 1) return value;
  return sum_over_ranks(holds_head() && mesh_->coordinates().tp == 0 ? value : 0.0);
}

std::vector<AxisTraffic> Engine::since(const std::vector<AxisTraffic>& before) const {
  std::vector<AxisTraffic> list = traffic();
  for (std::size_t i = 0; i < before.size(); ++i) {
    list[i].bytes_sent -= before[i].bytes_sent;
    list[i].wait_s -= before[i].wait_s;
  }
  return list;
}

std::vector<AxisTraffic> Engine::traffic() const {
  if (mesh_->world().size() == 1) return {};
  std::vector<AxisTraffic> list;
  const auto add = [&](const char* axis, const Communicator& group) {
    const CommStats stats = group.stats();
    list.push_back({axis, stats.bytes_sent, stats.wait_s});
  };
  add("tp", (*mesh_)[Axis::tp]);
  add("dp", (*mesh_)[Axis::dp]);
  add("pp", (*mesh_)[Axis::pp]);
  add("embedding", mesh_->embedding());
  add("world", mesh_->world());
  for (const auto& block : mesh_->tp_blocks()) {
    if (block) add("tp_block", *block);
  }
  return list;
}

}  // namespace tessera
