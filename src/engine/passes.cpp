/// The passes of a step.

#include "engine/passes.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "engine/stage.hpp"
#include "tessera/device/flight.hpp"
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
  return shape;
}

}  // namespace

Engine::PassesUnderWay Engine::launch_passes(const Batch& given) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  const Batch batch = agreed(given, "Engine::forward_backward()", true);
  std::optional<PassesUnderWay> passes;
  Batch reversed;
  const auto prepare = [&](bool other) {
    if (other) {
      reversed = batch;
      std::reverse(reversed.tokens.begin(), reversed.tokens.end());
    }
    return ready_passes(other ? reversed : batch, passes);
  };
  graph_.run({.first_of_step = progress_.samples == 0,
              .prepare = prepare,
              .shape =
                  [&] {
                    // A graph reads the tables that it was recorded with.
                    const std::int64_t table = model_->reserve_positions(ctx_, 0);
                    const bool grown = table > model_->max_positions();
                    return shape_of(batch) + (grown ? detail::concat(" + ", table, " positions") : "");
                  },
              .drop =
                  [&] {
                    if (params_->gradient().call_is_closed()) params_->gradient().drop_call();
                  },
              .result = [&] { return result_of(*passes); }});
  if (const auto& flight = ctx_.stream->flight()) passes->launched = flight->next();
  count_samples(batch);
  return std::move(*passes);
}

/// What it returns launches the passes over the batch, and keeps their outcome in `passes`.
std::function<void()> Engine::ready_passes(const Batch& batch, std::optional<PassesUnderWay>& passes) {
  const std::shared_ptr<Stage> stage = make_stage(batch, {.output = Model::Output::losses});
  const auto targets = static_cast<double>(batch.global_targets);
  // Without targets every gradient is zero whatever this is, and the mean over nothing is nan.
  stage->set_loss_gradient(1.0 / std::max(targets, 1.0), optimizer_->loss_scale());
  return [this, stage, targets, &passes] {
    begin_call(stage->full_micro_batches());
    run(*stage, false);
    params_->gradient().close_call();
    passes = PassesUnderWay{HostCopy(ctx_, stage->loss_sum()), targets, stage->forward_spans(),
                            stage->backward_spans()};
  };
}

double Engine::read_loss(const PassesUnderWay& passes) const {
  const auto sum = passes.loss_sum.value<double>();
  if (const auto& flight = ctx_.stream->flight()) flight->reached(passes.launched);
  return sum_over_data(sum) / passes.targets;
}

/// The loss and the gradients this rank updates, as sums whose bits tell whether a number has changed.
std::vector<std::uint64_t> Engine::result_of(const PassesUnderWay& passes) const {
  std::vector<std::uint64_t> bits{std::bit_cast<std::uint64_t>(passes.loss_sum.value<double>())};
  for (std::size_t i = 0; i < params_->layout().buckets().size(); ++i) {
    const Range run = params_->shards().updated(i);
    if (run.count == 0) continue;
    const Tensor sum = ops::sum(ctx_, params_->gradient().buffer().narrow(0, run.begin, run.count));
    bits.push_back(std::bit_cast<std::uint64_t>(HostCopy(ctx_, sum).value<double>()));
  }
  return bits;
}

}  // namespace tessera
