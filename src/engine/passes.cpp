/// The passes of a step.

#include "engine/passes.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "engine/ranks.hpp"
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
  const std::shared_ptr<Stage> stage = make_stage(batch, own_loss(batch), {});
  return [this, stage, &passes] {
    begin_call(stage->full_micro_batches());
    run(*stage, false);
    params_->gradient().close_call();
    passes = PassesUnderWay{stage->loss().terms(), stage->loss().sums(ctx_), stage->forward_spans(),
                            stage->backward_spans()};
  };
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

/// The loss and the gradients this rank updates, as sums whose bits tell whether a number has changed.
std::vector<std::uint64_t> Engine::result_of(const PassesUnderWay& passes) const {
  std::vector<std::uint64_t> bits;
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
