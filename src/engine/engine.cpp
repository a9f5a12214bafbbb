#include "tessera/engine/engine.hpp"

#include <algorithm>

#include "engine/stage.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/nn/models/decoder.hpp"
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

}  // namespace

/// A batch whose tapes wait for a gradient.
struct Engine::Forwarded {
  Batch batch;
  std::unique_ptr<Stage> stage;
};

/// A step whose result was not read yet. What it computed with stays until then.
struct Engine::StepUnderWay {
  Batch batch;
  std::unique_ptr<Stage> stage;
  LossUnderWay loss;
  Spans update;
  StepReport report;
};

EngineOptions EngineOptions::from(const Config& config) {
  EngineOptions options{.optimizer = config.optimizer,
                        .lr_schedule = config.lr_schedule,
                        .steps = config.training.steps,
                        .micro_batch_size = config.training.micro_batch_size,
                        .compute = numerics_of(config.training).compute,
                        .loss_scale = loss_scale_of(config.training),
                        .max_skipped_steps = config.training.max_skipped_steps};
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
                            .trainable = options.trainable,
                            .groups = {.data = &(*mesh_)[Axis::dp],
                                       .tensor = &(*mesh_)[Axis::tp],
                                       .embedding = &mesh_->embedding(),
                                       .world = &mesh_->world(),
                                       .tensor_block = [mesh = mesh_.get()](int copies) -> Communicator& {
                                         return mesh->tp_block(copies);
                                       }},
                            .zero_stage = options.layout.zero_stage,
                            .bucket_elements = options.layout.bucket_elements})),
      optimizer_(options.trainable
                     ? std::make_unique<Optimizer>(ctx_, *params_, options.optimizer, options.loss_scale)
                     : nullptr),
      lr_schedule_(options.lr_schedule, options.optimizer.lr, options.steps),
      weight_decay_schedule_(options.lr_schedule, options.optimizer.weight_decay, options.steps),
      executor_(ctx_, (*mesh_)[Axis::pp]) {
  TESSERA_CHECK_EQ(model_->num_pieces(), options.layout.chunks,
                   "pieces of the model on this rank, chunks of the layout");
}

Engine::~Engine() = default;

StepReport Engine::step(const Batch& batch) {
  TESSERA_CHECK(steps_.empty(), "step() was called while ", steps_.size(),
                " steps are under way: finish_step() takes their results");
  launch_step(batch);
  return finish_step();
}

void Engine::launch_step(const Batch& batch) {
  auto step =
      std::make_unique<StepUnderWay>(batch, nullptr, LossUnderWay{}, Spans(ctx_.stream), StepReport{});
  const std::vector<AxisTraffic> before = traffic();
  step->loss = launch_forward_backward(step->batch, 1.0, step->stage);
  {
    const Spans::Span span(step->update);
    launch_update();
  }
  for (const ExecutedAction& action : executor_.executed()) step->report.times.bubble += action.waited_s;
  step->report.tokens = batch.batch * batch.seq_length * mesh_->shape().dp;
  step->report.traffic = since(before);
  steps_.push_back(std::move(step));
}

StepReport Engine::finish_step() {
  TESSERA_CHECK(!steps_.empty(), "finish_step() needs a launch_step() before it");
  const std::unique_ptr<StepUnderWay> step = std::move(steps_.front());
  steps_.pop_front();
  StepReport result = std::move(step->report);
  const std::vector<AxisTraffic> before = traffic();
  result.loss = read(step->loss);
  const std::vector<AxisTraffic> more = since(before);
  for (std::size_t i = 0; i < more.size(); ++i) {
    result.traffic[i].bytes_sent += more[i].bytes_sent;
    result.traffic[i].wait_s += more[i].wait_s;
  }
  result.update = finish_update();
  result.times.forward = step->stage->forward_spans().seconds();
  result.times.backward = step->stage->backward_spans().seconds();
  result.times.update = step->update.seconds();
  return result;
}

double Engine::forward_backward(const Batch& batch, double factor) {
  std::unique_ptr<Stage> stage;
  return read(launch_forward_backward(batch, factor, stage));
}

Engine::LossUnderWay Engine::launch_forward_backward(const Batch& batch, double factor,
                                                     std::unique_ptr<Stage>& stage) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  check_batch(batch, true);
  const double targets = sum_over_data(static_cast<double>(count_targets(batch)));
  TESSERA_CHECK(targets > 0, "no label of this batch counts: all ", batch.labels.size(), " are -100");
  stage = make_stage(batch, Model::Output::losses, true, true);
  stage->set_loss_gradient(1.0 / targets, optimizer_->loss_scale());
  open_call(stage->micro_batches());
  executor_.run(schedule(stage->micro_batches(), false), *stage);
  params_->finish_call(factor);
  samples_this_step_ += batch.batch * mesh_->shape().dp;
  return {copy_of(stage->loss_sum()), targets};
}

HostCopy Engine::copy_of(const Tensor& sum) const { return sum ? HostCopy(ctx_, sum) : HostCopy(); }

double Engine::read(const LossUnderWay& loss) const {
  return sum_over_data(loss.sum.value<double>()) / loss.targets;
}

Tensor Engine::forward(const Batch& batch, Output output) {
  TESSERA_CHECK(!forwarded_, "forward() was called again before backward() or discard()");
  check_batch(batch, output == Output::token_losses);
  auto next = std::make_unique<Forwarded>();
  next->batch = batch;
  next->stage = make_stage(
      next->batch, output == Output::logits ? Model::Output::logits : Model::Output::losses, true, true);
  Stage& stage = *next->stage;
  executor_.run(schedule(stage.micro_batches(), true), stage);
  forwarded_ = std::move(next);
  samples_this_step_ += batch.batch * mesh_->shape().dp;
  if (!holds_head()) return {};
  const std::int64_t width = output == Output::logits ? model_->vocab_size() : 1;
  Tensor result = Tensor::empty(ctx_, {batch.batch, batch.seq_length, width}, DType::f32);
  for (int i = 0; i < stage.micro_batches(); ++i) {
    const Part samples = stage.samples(i);
    Tensor value = ops::contiguous(ctx_, stage.outputs()[static_cast<std::size_t>(i)]);
    if (value.dtype() != DType::f32) value = ops::cast(ctx_, value, DType::f32);
    ops::copy(ctx_, value.view({batch.seq_length, samples.count, width}).transpose(0, 1),
              result.narrow(0, samples.begin, samples.count));
  }
  return output == Output::logits ? result : result.view({batch.batch, batch.seq_length});
}

void Engine::backward(const Tensor& upstream) {
  TESSERA_CHECK(forwarded_ != nullptr, "backward() needs a forward() before it");
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  Stage& stage = *forwarded_->stage;
  const Batch& batch = forwarded_->batch;
  if (holds_head()) {
    TESSERA_CHECK(upstream && upstream.dtype() == DType::f32 && upstream.rank() >= 2 &&
                      upstream.size(0) == batch.batch && upstream.size(1) == batch.seq_length,
                  "upstream gradient of shape ", upstream.shape(), " and dtype ", upstream.dtype(),
                  " for an output of ", batch.batch, " samples of ", batch.seq_length, " positions");
    const std::int64_t width = upstream.numel() / (batch.batch * batch.seq_length);
    const Tensor whole = upstream.view({batch.batch, batch.seq_length, width});
    for (int i = 0; i < stage.micro_batches(); ++i) {
      const Part samples = stage.samples(i);
      const Tensor& value = stage.outputs()[static_cast<std::size_t>(i)];
      TESSERA_CHECK_EQ(value.numel(), samples.count * batch.seq_length * width, "upstream gradient");
      const Tensor grad = Tensor::empty(ctx_, {batch.seq_length, samples.count, width}, DType::f32);
      ops::copy(ctx_, whole.narrow(0, samples.begin, samples.count).transpose(0, 1), grad);
      if (const Tensor scale = optimizer_->loss_scale()) ops::scale_by(ctx_, grad, scale);
      const Tensor shaped = grad.view(value.shape());
      stage.set_upstream(i, value.dtype() == DType::f32 ? shaped : ops::cast(ctx_, shaped, value.dtype()));
    }
  }
  open_call(stage.micro_batches());
  Schedule backwards = schedule(stage.micro_batches(), false);
  for (auto& column : backwards.actions)
    std::erase_if(column, [](const Action& a) { return a.kind == Action::Kind::forward; });
  executor_.run(backwards, stage);
  forwarded_.reset();
  params_->finish_call(1.0 / mesh_->shape().dp);
}

void Engine::discard() {
  forwarded_.reset();
  params_->discard_gradients();
  samples_this_step_ = 0;
}

UpdateResult Engine::update() {
  TESSERA_CHECK(steps_.empty(), "update() was called while ", steps_.size(), " steps are under way");
  launch_update();
  return finish_update();
}

void Engine::launch_update() {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  TESSERA_CHECK(!forwarded_, "update() was called between forward() and backward()");
  optimizer_->launch_step([this](std::int64_t updates) {
    return UpdateRates{lr_schedule_.at(updates), weight_decay_schedule_.at(updates)};
  });
  ++steps_done_;
  samples_this_step_ = 0;
}

UpdateResult Engine::finish_update() {
  const double lr = lr_schedule_.at(optimizer_->updates());
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
  return {done.grad_norm, lr, done.skipped, done.loss_scale};
}

double Engine::evaluate(const Batch& batch) {
  const LossSum loss = evaluate_sum(batch);
  return loss.sum / std::max(1.0, loss.targets);
}

Engine::LossSum Engine::evaluate_sum(const Batch& batch) {
  check_batch(batch, true);
  const auto stage = make_stage(batch, Model::Output::losses, false, false);
  executor_.run(schedule(stage->micro_batches(), true), *stage);
  return {sum_over_data(copy_of(stage->loss_sum()).value<double>()),
          sum_over_data(static_cast<double>(count_targets(batch)))};
}

void Engine::set_progress(std::int64_t steps_done, std::int64_t steps_skipped) {
  steps_done_ = steps_done;
  steps_skipped_ = steps_skipped;
}

std::unique_ptr<Stage> Engine::make_stage(const Batch& batch, Model::Output output, bool training,
                                          bool record) {
  Stage::Options options{
      .output = output,
      .training = training,
      .record = record,
      .step = static_cast<std::uint32_t>(steps_done_),
      .samples_before = samples_this_step_,
      .micro_batch_size = options_.micro_batch_size > 0 ? options_.micro_batch_size : batch.batch};
  if (record)
    options.on_gradient_ready = [this](Parameter& parameter) { params_->gradient_ready(parameter); };
  return std::make_unique<Stage>(ctx_, *model_, batch, std::move(options));
}

Schedule Engine::schedule(int micro_batches, bool forward_only) const {
  return make_schedule(options_.layout.schedule, mesh_->shape().pp, options_.layout.chunks, micro_batches,
                       forward_only);
}

void Engine::open_call(int micro_batches) {
  params_->begin_call(
      [&](const Parameter& parameter) { return model_->pieces_using(parameter) * micro_batches; });
}

void Engine::check_batch(const Batch& batch, bool needs_labels) const {
  validate(batch, model_->vocab_size());
  TESSERA_CHECK(batch.batch > 0 && batch.seq_length > 0, "an empty batch: ", batch.batch, " samples of ",
                batch.seq_length, " tokens");
  TESSERA_CHECK(batch.seq_length <= model_->max_positions(), "a sequence of ", batch.seq_length,
                " tokens is longer than the model's max_positions ", model_->max_positions());
  TESSERA_CHECK(!needs_labels || !batch.labels.empty(), "this batch has no labels");
}

bool Engine::holds_head() const { return model_->is_last(model_->num_pieces() - 1); }

double Engine::sum_over_data(double value) const {
  if (mesh_->world().size() == 1) return value;
  const bool gives = holds_head() && mesh_->coordinates().tp == 0;
  const Tensor sum = Tensor::from(host_, std::vector<double>{gives ? value : 0.0}, {1});
  mesh_->world().all_reduce(host_, sum).wait(host_);
  return sum.to_vector<double>()[0];
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
