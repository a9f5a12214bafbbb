#include "tessera/engine/engine.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/open_calls.hpp"
#include "engine/passes.hpp"
#include "engine/ranks.hpp"
#include "engine/shard_flow.hpp"
#include "engine/stage.hpp"
#include "engine/traffic.hpp"
#include "tessera/autograd/activation_offload.hpp"
#include "tessera/base/config.hpp"
#include "tessera/base/precision.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/nn/stack.hpp"
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

/// What of it means anything: the host's memory is no other place where the device's is that.
OffloadConfig offload_on(const ExecCtx& ctx, OffloadConfig offload) {
  if (ctx.device().is_cuda() || offload.memory_apart) return offload;
  for (OffloadTo* to : {&offload.optimizer, &offload.gradients, &offload.parameters, &offload.activations}) {
    if (*to == OffloadTo::cpu) *to = OffloadTo::none;
  }
  return offload;
}

std::function<bool(const Parameter&)> frozen_by(const ParamGroups& groups) {
  if (groups.groups.empty()) return nullptr;
  return [groups](const Parameter& parameter) { return groups.freezes(parameter); };
}

/// The ranks that hold the parameters of this one.
StoreGroups groups_of(ProcessMesh& mesh, const EngineOptions& options) {
  StoreGroups groups{.data = &mesh.replicas(),
                     .tensor = &mesh[Axis::tp],
                     .embedding = &mesh.embedding(),
                     .world = &mesh.world(),
                     .sent = options.layout.gradient_dtype,
                     .tensor_block = [&mesh](int copies) -> Communicator& { return mesh.tp_block(copies); }};
  if (mesh.shape().ep > 1) groups.experts.data = &mesh[Axis::edp];
  const bool gathers = options.layout.zero_stage == 3, shares = options.layout.zero_stage > 0;
  const int size =
      shares && options.layout.zero_group > 0 ? options.layout.zero_group : mesh.shape().replicas();
  if (!options.trainable || !(gathers || size < mesh.shape().replicas())) return groups;
  const auto& [shard, copy, gather, expert_gather] = mesh.share_data(size, gathers);
  if (shard) groups.data = shard.get();
  groups.copies = copy.get();
  groups.gathering = gather.get();
  groups.experts.gathering = expert_gather.get();
  return groups;
}

/// What is not a number has no sign to print either.
double without_sign_of_nan(double value) { return std::isnan(value) ? std::nan("") : value; }

/// Only first and last stage add up the gradients of a table that both hold.
void check_ties(const ProcessMesh& mesh, const ParamStore& params) {
  for (const Parameter* p : params.parameters()) {
    TESSERA_CHECK(!p->traits().tied || mesh.embedding().size() > 1, "parameter ", p->name(),
                  " is tied to a copy on another pipeline stage, but this stage (", mesh.coordinates().pp,
                  " of ", mesh.shape().pp,
                  ") is neither the first nor the last of several: give it a weight of its own");
  }
}

}  // namespace

/// A step whose result was not read yet.
struct Engine::StepUnderWay {
  PassesUnderWay passes;
  Spans update;
  StepReport report;
  std::uint64_t launched = 0;  ///< operations of the flight recorder so far
};

EngineOptions EngineOptions::from(const Config& config) {
  EngineOptions options{.optimizer = config.optimizer,
                        .offload = config.offload,
                        .lr_schedule = config.lr_schedule,
                        .steps = config.training.steps,
                        .micro_batch_size = config.training.micro_batch_size,
                        .compute = numerics_of(config.training).compute,
                        .loss_scale = loss_scale_of(config.training),
                        .max_skipped_steps = config.training.max_skipped_steps,
                        // Experts: the host reads how many tokens each gets, which no graph can repeat.
                        .cuda_graph = config.model.num_experts ? AutoSwitch::off : config.device.cuda_graph};
  options.layout.schedule = config.parallel.schedule;
  options.layout.chunks = pieces_per_stage(config.parallel);
  options.layout.zero_stage = static_cast<int>(config.parallel.zero_stage);
  options.layout.zero_group = static_cast<int>(config.parallel.zero_group.value_or(0));
  options.layout.gradient_dtype = dtype_of_precision(config.parallel.gradient_dtype);
  options.layout.zero_reshard = config.parallel.zero_reshard;
  options.layout.context_method = config.parallel.context_method;
  return options;
}

Engine::Engine(std::unique_ptr<Model> model, const EngineOptions& options, ExecCtx ctx)
    : ctx_(std::move(ctx)),
      options_(options),
      mesh_(options.layout.mesh ? options.layout.mesh : ProcessMesh::self()),
      model_(std::move(model)),
      params_(
          std::make_unique<ParamStore>(ctx_, model_->parameters(),
                                       ParamStoreOptions{.compute = options.compute,
                                                         .split_main = options.optimizer.split_main_weights,
                                                         .trainable = options.trainable,
                                                         .groups = groups_of(*mesh_, options),
                                                         .zero_stage = options.layout.zero_stage,
                                                         .unit = unit_numbers(*model_, options.layout),
                                                         .bucket_elements = options.layout.bucket_elements,
                                                         .frozen = frozen_by(options.groups),
                                                         .offload = offload_on(ctx_, options.offload)})),
      optimizer_(options.trainable ? std::make_unique<Optimizer>(ctx_, *params_, options.optimizer,
                                                                 options.loss_scale, options.groups)
                                   : nullptr),
      lr_schedule_(options.lr_schedule, options.optimizer.lr, options.steps),
      weight_decay_schedule_(options.lr_schedule, options.optimizer.weight_decay, options.steps),
      executor_(ctx_, (*mesh_)[Axis::pp]),
      flow_(ShardFlow::make(*model_, *params_, options.layout)),
      // Memory that comes and goes, and gathers that follow the passes, are not what a graph records.
      graph_(ctx_,
             options.trainable && !flow_ && !offload_on(ctx_, options.offload).any() ? options.cuda_graph
                                                                                     : AutoSwitch::off,
             mesh_->world()) {
  progress_.seed = ctx_.seed;
  if (options.trainable && offload_on(ctx_, options.offload).activations != OffloadTo::none)
    ctx_.activations = std::make_shared<ActivationOffload>(ctx_, options.offload.pin_memory);
  ops::prepare_stream(ctx_);
  if (!ctx_.stream->flight()) ctx_.stream->set_flight(mesh_->world().flight());
  TESSERA_CHECK_EQ(model_->num_pieces(), options.layout.chunks,
                   "pieces of the model on this rank, chunks of the layout");
  check_ties(*mesh_, *params_);
  TESSERA_ENSURE(ConfigError, !context().active() || model_->takes_sequence_parts(), "parallel.context ",
                 context().size(), ": this model computes whole samples only; use 1");
  if (options.trainable && offload_on(ctx_, options.offload) != options.offload)
    offload_notes_.push_back("offload to cpu changes nothing where the CPU is the device");
  if (const auto& place = params_->place())
    offload_notes_.insert(offload_notes_.end(), place->notes.begin(), place->notes.end());
}

Engine::~Engine() {
  forget_calls();
  for (OpenForward::State* forward : open_forwards_) forward->engine = nullptr;
}

Engine::StreamEnd::~StreamEnd() { ops::forget_stream(ctx); }

StepReport Engine::step(const Batch& batch) {
  const FlightCall open(ctx_.stream->flight(), "Engine::step()");
  TESSERA_CHECK(steps_.empty(), "step() was called while ", steps_.size(),
                " steps are under way: finish_step() takes their results");
  launch_step(batch);
  return finish_step();
}

BatchCall Engine::about(BatchCall call, const Batch* batch, bool needs_labels) const {
  try {
    if (batch != nullptr) check_batch(*batch, needs_labels);
  } catch (const Error&) {
    if (mesh_->world().size() == 1) throw;
    call.failure = std::current_exception();
  }
  call.step = progress_.steps;
  call.frozen_hash = frozen_hash_;
  call.frozen = [this] {
    std::string names;
    for (const auto& [name, told] : frozen_) names += told + "\n";
    return names;
  };
  return call;
}

Batch Engine::agreed(const Batch& batch, const char* call, bool needs_labels) const {
  Batch result = batch;
  if (batch.global_targets == Batch::kUnknown) {
    agree(*mesh_, result, about({.name = call}, &batch, needs_labels));
  } else {
    check_batch(batch, needs_labels);
  }
  return result;
}

void Engine::launch_step(const Batch& batch) {
  const FlightCall open(ctx_.stream->flight(), "Engine::launch_step()");
  StepReport report;
  std::unique_ptr<StepUnderWay> step;
  {
    const TrafficSpan traffic(*mesh_, report.traffic);
    step = std::make_unique<StepUnderWay>(launch_passes(batch), Spans(ctx_.stream));
    if (step->passes.terms[0].count == 0) {
      params_->gradient().drop_call();
      throw DataError(detail::concat("no label of this batch counts: all are ", kIgnoredLabel,
                                     ", so a step would only decay weights; check the data"));
    }
    params_->gradient().add_call(1.0);
    const Spans::Span span(step->update);
    launch_update();
  }
  report.executed = std::move(step->passes.executed);
  report.tokens = batch.batch * batch.seq_length * mesh_->shape().dp;
  step->report = std::move(report);
  if (const auto& flight = ctx_.stream->flight()) step->launched = flight->next();
  steps_.push_back(std::move(step));
}

StepReport Engine::finish_step() {
  const FlightCall open(ctx_.stream->flight(), "Engine::finish_step()");
  TESSERA_CHECK(!steps_.empty(), "finish_step() needs a launch_step() before it");
  const std::unique_ptr<StepUnderWay> step = std::move(steps_.front());
  steps_.pop_front();
  StepReport result = std::move(step->report);
  {
    const TrafficSpan traffic(*mesh_, result.traffic);
    result.loss = without_sign_of_nan(read_loss(step->passes));
    result.terms = terms_;
  }
  result.update = finish_update(scheduled_lr());
  if (const auto& flight = ctx_.stream->flight()) flight->reached(step->launched);
  result.times.forward = step->passes.forward.seconds();
  result.times.backward = step->passes.backward.seconds();
  result.times.update = step->update.seconds();
  result.times.bubble = step->passes.stalls.seconds();
  return result;
}

double Engine::forward_backward(const Batch& batch, double factor) {
  const FlightCall open(ctx_.stream->flight(), "Engine::forward_backward()");
  const PassesUnderWay passes = launch_passes(batch);
  params_->gradient().add_call(factor);
  factors_.push_back(factor);
  return read_loss(passes);
}

void Engine::discard() {
  forget_calls();
  factors_.clear();
  if (flow_) flow_->abandon();
  params_->gradient().discard();
  progress_.samples = 0;
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

void Engine::after_update() {
  forget_calls();
  factors_.clear();
  ++progress_.steps;
  progress_.samples = 0;
}

UpdateResult Engine::finish_update(double lr) {
  const StepResult done = optimizer_->finish_step();
  // While the loss scale can still fall, a gradient that overflowed only says that it was too large.
  const LossScaleRule& rule = options_.loss_scale.rule;
  const bool scale_falls = rule.growth_interval > 0 && done.loss_scale > static_cast<double>(rule.smallest);
  if (!done.skipped) skipped_in_a_row_ = 0;
  if (done.skipped && !scale_falls) ++skipped_in_a_row_;
  progress_.skipped += done.skipped ? 1 : 0;
  TESSERA_ENSURE(
      TrainingError, skipped_in_a_row_ < options_.max_skipped_steps, "training stopped at step ",
      progress_.steps - static_cast<std::int64_t>(steps_.size()), ": the gradient was not finite ",
      skipped_in_a_row_,
      " steps in a row. The weights are those of the last good step. Lower optimizer.lr, lengthen the "
      "warm-up, or check the data");
  return {without_sign_of_nan(done.grad_norm), lr, done.skipped, done.loss_scale};
}

double Engine::evaluate(const Batch& batch) { return total_of(evaluate_terms(batch)); }

std::vector<LossTerm> Engine::evaluate_terms(const Batch& given) {
  const FlightCall open(ctx_.stream->flight(), "Engine::evaluate()");
  const Batch batch = agreed(given, "Engine::evaluate()", true);
  const auto stage = make_stage(batch, own_loss(batch), {.training = false, .record = false});
  run(*stage, true);
  return read_terms(stage->loss().terms(), stage->loss().sums(ctx_));
}

std::vector<EngineNote> Engine::take_notes() {
  std::vector<EngineNote> notes;
  for (std::string& text : graph_.take_notes()) notes.push_back({std::move(text)});
  for (std::string& text : std::exchange(offload_notes_, {})) notes.push_back({std::move(text), true});
  std::string backend = ops::take_backend_notes(ctx_);
  if (!backend.empty()) notes.push_back({std::move(backend), true});
  return notes;
}

void Engine::set_trace(const std::shared_ptr<Trace>& trace) {
  ctx_.stream->set_trace(trace);
  host_.stream->set_trace(trace);
}

std::unique_ptr<Stage> Engine::make_stage(const Batch& batch, LossPlan loss, StageOptions options) {
  model_->reserve_positions(ctx_, position_count(batch));
  ctx_.seed = progress_.seed;
  // Where data ranks work on each other's shares, or tokens, they make the same passes, some of them without
  // samples.
  const bool exchanges = mesh_->shape().ep > 1, together = flow_ || exchanges;
  const std::int64_t most = together ? std::max(batch.batch, batch.most_samples) : batch.batch;
  options.context = context();
  options.step = static_cast<std::uint32_t>(progress_.steps);
  options.samples_before = progress_.samples;
  options.micro_batch_size =
      options_.micro_batch_size > 0 ? options_.micro_batch_size : std::max<std::int64_t>(1, batch.batch);
  if (options_.micro_batches > 0) {
    // Schedules that do not need a certain number of them leave out those without samples.
    const bool fixed = traits_of(options_.layout.schedule).whole_rounds;
    options.micro_batches = fixed ? options_.micro_batches : std::min(options_.micro_batches, most);
  }
  options.flow = flow_.get();
  if (together) options.most_samples = most;
  // As short as context and tensor ranks can share out.
  const std::int64_t cp = mesh_->shape().cp;
  if (exchanges) options.padding_length = std::lcm(cp > 1 ? 2 * cp : 1, std::int64_t{mesh_->shape().tp});
  if (options.record)
    options.on_gradient_ready = [this](Parameter& parameter) { params_->gradient().ready(parameter); };
  return std::make_unique<Stage>(ctx_, *model_, batch, std::move(loss), std::move(options));
}

void Engine::run(Stage& stage, bool forward_only) {
  if (stage.micro_batches() > 0) run(stage, schedule(stage.micro_batches(), forward_only));
}

void Engine::run(Stage& stage, const Schedule& schedule) {
  if (!flow_) return executor_.run(schedule, stage, stage.clock());
  flow_->begin(schedule.actions[static_cast<std::size_t>(mesh_->coordinates().pp)]);
  executor_.run(schedule, stage, stage.clock());
  flow_->end();
}

void Engine::count_samples(const Batch& batch) {
  progress_.samples += samples_of_all(batch, mesh_->shape().dp);
}

Schedule Engine::schedule(int micro_batches, bool forward_only) const {
  return make_schedule(options_.layout.schedule, mesh_->shape().pp, options_.layout.chunks, micro_batches,
                       forward_only);
}

void Engine::check_batch(const Batch& batch, bool needs_labels) const {
  if (batch.batch == 0 && mesh_->shape().dp > 1) return;  // another data rank has samples
  validate(batch, model_->vocab_size(), model_->position_limit());
  validate_extras(batch, model_->token_types(), model_->sample_classes(), model_->reads_encoder_tokens());
  model_->check_length(batch.seq_length);
  // Throws for a length that context ranks cannot share.
  context().part(batch.seq_length).runs();
  if (batch.encoder_seq_length > 0) model_->check_length(batch.encoder_seq_length);
  const bool whole = model_->reads_whole_samples();
  TESSERA_CHECK(!whole || batch.labels.empty(),
                "this batch has labels of tokens, and the model has no head for these");
  TESSERA_CHECK(!needs_labels || !(whole ? batch.sample_labels : batch.labels).empty(), "this batch has no ",
                whole ? "sample_labels" : "labels");
}

ContextParallel Engine::context() const { return {&(*mesh_)[Axis::cp], options_.layout.context_method}; }

bool Engine::holds_head() const { return model_->is_last(model_->num_pieces() - 1); }

}  // namespace tessera
