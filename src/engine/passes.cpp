/// The passes of a step.

#include "engine/passes.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "engine/ranks.hpp"
#include "engine/stage.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
namespace {

/// What decides which kernels the passes over a batch launch.
std::string shape_of(const Batch& batch) {
  std::string shape = detail::concat(batch.batch, " x ", batch.seq_length);
  const auto add = [&](const char* name, const auto& part) {
    if (!part.empty()) shape += name;
  };
  add(" + positions", batch.position_ids);
  add(" + key begins", batch.key_begin);
  add(" + key ends", batch.key_end);
  add(" + documents", batch.document_ids);
  add(" + token types", batch.token_types);
  add(" + sample labels", batch.sample_labels);
  if (batch.encoder_seq_length > 0) shape += detail::concat(" + encoder's ", batch.encoder_seq_length);
  add(" + encoder's key begins", batch.encoder_key_begin);
  add(" + encoder's key ends", batch.encoder_key_end);
  return shape;
}

}  // namespace

Engine::PassesUnderWay Engine::launch_passes(const Batch& given) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  const auto batch = std::make_shared<const Batch>(agreed(given, "Engine::forward_backward()", true));
  std::optional<PassesUnderWay> passes;
  const auto make = [&](bool other) {
    if (!other) return std::make_unique<PassesTurn>(*this, batch, passes);
    const auto reversed = std::make_shared<Batch>(*batch);
    std::reverse(reversed->tokens.begin(), reversed->tokens.end());
    return std::make_unique<PassesTurn>(*this, reversed, passes);
  };
  const auto repeatable = [&](const ExecCtx& lasting) {
    return std::make_unique<PassesTurn>(*this, batch, passes, lasting);
  };
  graph_.run(
      {.shape =
           [&] {
             // A graph reads the tables that it was recorded with.
             const std::int64_t table = model_->reserve_positions(ctx_, position_count(*batch));
             const bool grown = table > model_->max_positions();
             return shape_of(*batch) + (grown ? detail::concat(" + ", table, " positions") : "");
           },
       .make = make,
       .make_repeatable = repeatable,
       .why_not = [&](StepGraph::Turn& turn) { return static_cast<PassesTurn&>(turn).why_not(*batch); },
       .load = [&](StepGraph::Turn& turn) { static_cast<PassesTurn&>(turn).load(passes); },
       .never = why_never_repeated(),
       .call = call_of_step(*batch),
       .coming = [&] { return params_->weights().coming(); },
       .await = [&] { params_->weights().wait(); },
       .drop =
           [&] {
             if (params_->gradient().call_is_closed()) params_->gradient().drop_call();
           },
       .result = [&] { return result_of(*passes); }});
  if (const auto& flight = ctx_.stream->flight()) passes->launched = flight->next();
  count_samples(*batch);
  return std::move(*passes);
}

std::string Engine::why_never_repeated() const {
  if (mesh_->world().options().check) return "ranks compare what they exchange call by call";
  if (!model_->is_repeatable()) return "the model's passes may read the host's memory (Model::is_repeatable)";
  return "";
}

/// How many calls of as many samples came before, where all had as many.
std::int64_t Engine::call_of_step(const Batch& batch) const {
  const std::int64_t samples = samples_of_all(batch, mesh_->shape().dp);
  const bool alike = samples > 0 && progress_.samples % samples == 0;
  return alike ? progress_.samples / samples : progress_.samples;
}

Engine::PassesTurn::PassesTurn(Engine& engine, std::shared_ptr<const Batch> batch, Outcome& outcome)
    : engine_(engine), batch_(std::move(batch)), outcome_(&outcome), stalls_(engine.ctx_.stream) {
  stage_ = engine_.make_stage(*batch_, engine_.own_loss(*batch_), {});
  terms_ = stage_->loss().terms();
  engine_.begin_call(stage_->computed_micro_batches());
}

Engine::PassesTurn::PassesTurn(Engine& engine, std::shared_ptr<const Batch> batch, Outcome& outcome,
                               const ExecCtx& lasting)
    : PassesTurn(engine, std::move(batch), outcome) {
  // Around forward, backward and weight gradients, and around the wait for what each of them reads.
  constexpr std::int64_t kMarks = 2 * 2 * 3;
  memory_ = std::make_unique<StepMemory>(lasting, values_of(*stage_),
                                         kMarks * stage_->micro_batches() * engine_.options_.layout.chunks);
  clock_ = std::make_shared<DeviceClock>(engine_.ctx_, memory_->times());
  stage_->keep_in(*memory_, clock_);
  found_ = found();
}

void Engine::PassesTurn::launch() {
  if (memory_) ops::fill_zero(engine_.ctx_, memory_->told());
  engine_.run(*stage_, false);
  engine_.params_->gradient().close_call();
  executed_ = engine_.executor_.executed();
  stalls_ = engine_.executor_.stalls();
}

void Engine::PassesTurn::finish(bool repeated) {
  if (repeated) engine_.params_->gradient().close_call(true);
  Outcome& outcome = *std::exchange(outcome_, nullptr);  // the call's, over when this turn is loaded again
  outcome = PassesUnderWay{
      terms_,   stage_->loss().sums(engine_.ctx_), stage_->forward_spans(), stage_->backward_spans(), stalls_,
      executed_};
  if (!clock_) return;
  const HostCopy times = clock_->read();
  outcome->forward = stage_->forward_spans().of_launch(times);
  outcome->backward = stage_->backward_spans().of_launch(times);
  outcome->stalls = stalls_.of_launch(times);
}

std::string Engine::PassesTurn::why_not(const Batch& batch) {
  const std::unique_ptr<Stage> stage = engine_.make_stage(batch, engine_.own_loss(batch), {});
  if (found() != found_) return "the seed, what is frozen, or where weights and gradients lie has changed";
  next_ = {values_of(*stage), stage->loss().terms(), stage->computed_micro_batches()};
  const bool fits = memory_->fits(next_.values);
  return fits ? "" : "micro-batches are cut otherwise, or are other samples of the step";
}

void Engine::PassesTurn::load(Outcome& outcome) {
  memory_->load(next_.values);
  terms_ = std::move(next_.terms);
  outcome_ = &outcome;
  engine_.begin_call(next_.micro_batches);
}

StepMemory::Values Engine::PassesTurn::values_of(const Stage& stage) const {
  StepMemory::Values values{.micro_batches = {},
                            .step = static_cast<std::uint32_t>(engine_.progress_.steps),
                            .gradients = stage.loss().gradients()};
  for (int i = 0; i < stage.micro_batches(); ++i) {
    const bool empty = stage.samples(i).count == 0;
    values.micro_batches.push_back(empty ? MicroBatch() : stage.make_micro_batch(engine_.host_, i));
  }
  return values;
}

std::vector<std::uint64_t> Engine::PassesTurn::found() const {
  std::vector<std::uint64_t> found{engine_.progress_.seed, engine_.frozen_hash_};
  const auto add = [&](const Tensor& tensor) {
    found.push_back(reinterpret_cast<std::uintptr_t>(tensor.raw()));
  };
  add(engine_.optimizer_->loss_scale());
  for (const Parameter* parameter : engine_.params_->parameters()) {
    add(parameter->value());
    add(parameter->trained() ? parameter->grad() : Tensor());
  }
  return found;
}

LossPlan Engine::own_loss(const Batch& batch) const {
  return LossPlan::mean(terms_of(*model_, batch, mesh_->shape().dp),
                        options_.trainable ? optimizer_->loss_scale() : Tensor(),
                        mesh_->coordinates().tp == 0);
}

double Engine::read_loss(const PassesUnderWay& passes) {
  std::vector<LossTerm> terms = read_terms(passes.terms, passes.sums);
  if (const auto& flight = ctx_.stream->flight()) flight->reached(passes.launched);
  terms_ = std::move(terms);
  // The mean over nothing is nan.
  return terms_[0].count > 0 ? total_of(terms_) : std::nan("");
}

std::vector<LossTerm> Engine::read_terms(std::vector<LossTerm> terms,
                                         const std::vector<HostCopy>& sums) const {
  std::vector<double> values;
  for (const HostCopy& sum : sums) values.push_back(sum.value<double>());
  if (mesh_->world().size() > 1) {
    // All tensor ranks have the tokens' losses alike; of extra ones each has added up what counts.
    if (!holds_head() || mesh_->coordinates().tp != 0) values[0] = 0;
    values = sum_over_ranks(host_, mesh_->world(), std::move(values));
  }
  for (std::size_t i = 0; i < terms.size(); ++i)
    terms[i].sum = std::isnan(values[i]) ? std::nan("") : values[i];
  return terms;
}

/// The loss and the gradients this rank updates, as sums whose bits tell whether a number has changed; first
/// whether all times were taken.
std::vector<std::uint64_t> Engine::result_of(const PassesUnderWay& passes) const {
  std::vector<std::uint64_t> bits;
  bits.push_back(passes.forward.are_told() && passes.backward.are_told() ? 1 : 0);
  for (const HostCopy& sum : passes.sums) bits.push_back(std::bit_cast<std::uint64_t>(sum.value<double>()));
  for (std::size_t i = 0; i < params_->layout().buckets().size(); ++i) {
    const Range run = params_->shards().updated(i);
    if (run.count == 0) continue;
    const Tensor sum =
        ops::sum(ctx_, params_->gradient().latest_call().on_device().narrow(0, run.begin, run.count));
    bits.push_back(std::bit_cast<std::uint64_t>(HostCopy(ctx_, sum).value<double>()));
  }
  return bits;
}

}  // namespace tessera
