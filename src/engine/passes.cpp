/// The passes of a step, piece by piece or as a graph.

#include "engine/passes.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <utility>

#include "engine/stage.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
namespace {

/// Calls before the trial: they fill pools, connect, choose algorithms.
constexpr std::int64_t kCallsBeforeTrial = 2;
/// Passes that are timed in a row, so that the host runs ahead as in training.
constexpr int kTimed = 3;

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
  return shape;
}

}  // namespace

std::string GraphTrial::text() const {
  if (!refusal.empty()) return "device.cuda_graph: off, " + refusal;
  std::ostringstream out;
  out << "device.cuda_graph: " << (used ? "on" : "off") << ", passes take " << std::setprecision(3)
      << graph_s / plain_s << " of the time as a graph";
  return out.str();
}

Engine::PassesUnderWay Engine::launch_passes(const Batch& given) {
  TESSERA_CHECK(options_.trainable, "this engine was made for inference (trainable = false)");
  const Batch batch = agreed(given, "Engine::forward_backward()", true);
  const bool undecided = graph_ && options_.cuda_graph == GraphUse::automatic && !graph_trial_;
  // A trace would make the trial one of pieces: it waits until no rank has one.
  const bool due = undecided && passes_launched_++ >= kCallsBeforeTrial &&
                   sum_over_ranks(ctx_.stream->trace() ? 1.0 : 0.0) == 0;
  PassesUnderWay passes = due ? try_graph(batch) : launch_once(batch, undecided ? nullptr : graph_.get());
  count_samples(batch);
  return passes;
}

Engine::PassesUnderWay Engine::launch_once(const Batch& batch, StreamGraph* graph,
                                           const std::function<void()>& before_launch) {
  const auto stage = make_stage(batch, own_loss(batch), {});
  std::vector<HostCopy> sums;
  const auto launch = [&] {
    begin_call(stage->full_micro_batches());
    run(*stage, false);
    params_->close_call();
    sums = stage->loss().sums(ctx_);
  };
  if (graph == nullptr) {
    launch();
  } else {
    // A graph reads the tables that it was recorded with.
    const std::int64_t table = model_->reserve_positions(ctx_, 0);
    const bool grown = table > model_->max_positions();
    const std::string shape = shape_of(batch) + (grown ? detail::concat(" + ", table, " positions") : "");
    const std::string first = shape + ", first of a step";
    if (graph->stats().launched > 0 && !graph->knows(shape) && !graph->knows(first)) tell_of_new_shape(shape);
    graph->run(samples_this_step_ == 0 ? first : shape, launch, before_launch);
  }
  const auto& flight = ctx_.stream->flight();
  return {stage->loss().terms(), std::move(sums), stage->forward_spans(), stage->backward_spans(),
          flight ? flight->next() : 0};
}

LossPlan Engine::own_loss(const Batch& batch) const {
  return LossPlan::mean(terms_of(*model_, batch, mesh_->shape().dp),
                        options_.trainable ? optimizer_->loss_scale() : Tensor(),
                        mesh_->coordinates().tp == 0);
}

void Engine::tell_of_new_shape(const std::string& shape) {
  if (std::exchange(told_of_new_shape_, true)) return;
  notes_.push_back(
      detail::concat("device.cuda_graph: a batch of a new shape (", shape,
                     "): its first turn runs piece by piece, later ones as a graph of their own; "
                     "the ",
                     StreamGraph::kMostGraphs, " shapes used last keep theirs"));
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
    values = sum_over_ranks(std::move(values));
  }
  for (std::size_t i = 0; i < terms.size(); ++i)
    terms[i].sum = std::isnan(values[i]) ? std::nan("") : values[i];
  return terms;
}

/// A step's passes several times over, plainly and as a graph, of which the last count: graphs are used from
/// now on if they give the same bits in no more time.
Engine::PassesUnderWay Engine::try_graph(const Batch& batch) {
  GraphTrial trial;
  // The graph's own first turn, which is plain.
  PassesUnderWay passes = launch_once(batch, graph_.get());
  const std::vector<std::uint64_t> expected = result_of(passes);
  const auto seconds = [&](StreamGraph* graph) {
    ctx_.stream->synchronize();
    const double begin = now_s();
    for (int i = 0; i < kTimed; ++i) {
      params_->drop_call();
      passes = launch_once(batch, graph);
    }
    ctx_.stream->synchronize();
    return sum_over_ranks((now_s() - begin) / kTimed);
  };
  trial.plain_s = seconds(nullptr);
  trial.refusal = why_not_graph(batch, expected);
  if (trial.refusal.empty()) {
    trial.graph_s = seconds(graph_.get());
    trial.used = trial.graph_s <= trial.plain_s;
  } else {
    graph_.reset();
    if (params_->call_is_closed()) params_->drop_call();
    passes = launch_once(batch, nullptr);
  }
  if (!trial.used) graph_.reset();
  notes_.push_back(trial.text());
  graph_trial_ = std::move(trial);
  return passes;
}

/// Records the passes, launches them if every rank has recorded its own, and compares. Empty if all went well
/// on all ranks.
std::string Engine::why_not_graph(const Batch& batch, const std::vector<std::uint64_t>& expected) {
  std::string why;
  bool told = false, launches = false;
  // Memory must not hold by chance what the graph is to compute: a pass over other tokens comes in between.
  Batch other = batch;
  std::reverse(other.tokens.begin(), other.tokens.end());
  params_->drop_call();
  launch_once(other, nullptr);
  params_->drop_call();
  try {
    const PassesUnderWay passes = launch_once(batch, graph_.get(), [&] {
      told = true;
      TESSERA_ENSURE(DeviceError, sum_over_ranks(0) == 0, "another rank could not record its part");
      launches = true;
    });
    if (result_of(passes) != expected) why = "as a graph the passes gave other numbers";
  } catch (const Error& error) {  // the device's, or NCCL's
    if (launches) throw;
    why = std::string("the passes cannot be recorded: ") + error.what();
    if (!told) sum_over_ranks(1);
    return why;
  }
  if (sum_over_ranks(why.empty() ? 0 : 1) > 0 && why.empty())
    why = "as a graph the passes gave other numbers on another rank";
  return why;
}

/// The loss and the gradients this rank updates, as sums whose bits tell whether a number has changed.
std::vector<std::uint64_t> Engine::result_of(const PassesUnderWay& passes) const {
  std::vector<std::uint64_t> bits;
  for (const HostCopy& sum : passes.sums) bits.push_back(std::bit_cast<std::uint64_t>(sum.value<double>()));
  for (std::size_t i = 0; i < params_->layout().buckets().size(); ++i) {
    const FlatRun run = params_->updated(i);
    if (run.count == 0) continue;
    const Tensor sum = ops::sum(ctx_, params_->grad_buffer().narrow(0, run.begin, run.count));
    bits.push_back(std::bit_cast<std::uint64_t>(HostCopy(ctx_, sum).value<double>()));
  }
  return bits;
}

double Engine::sum_over_ranks(double value) const {
  return mesh_->world().size() == 1 ? value : sum_over_ranks(std::vector<double>{value})[0];
}

std::vector<double> Engine::sum_over_ranks(std::vector<double> values) const {
  const Tensor sums = Tensor::from(host_, values, {static_cast<std::int64_t>(values.size())});
  mesh_->world().all_reduce(host_, sums).wait(host_);
  return sums.to_vector<double>();
}

}  // namespace tessera
