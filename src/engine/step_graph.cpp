#include "tessera/engine/step_graph.hpp"

#include <iomanip>
#include <sstream>

#include "engine/ranks.hpp"
#include "tessera/base/clock.hpp"

namespace tessera {
namespace {

/// Calls before the trial: they fill pools, connect, choose algorithms.
constexpr std::int64_t kCallsBeforeTrial = 2;
/// Passes that are timed in a row, so that the host runs ahead as in training.
constexpr int kTimed = 3;

}  // namespace

std::string GraphTrial::text() const {
  if (!refusal.empty()) return "device.cuda_graph: off, " + refusal;
  std::ostringstream out;
  out << "device.cuda_graph: " << (used ? "on" : "off") << ", passes take " << std::setprecision(3)
      << graph_s / plain_s << " of the time as a graph";
  return out.str();
}

StepGraph::StepGraph(const ExecCtx& ctx, AutoSwitch use, Communicator& world)
    : ctx_(ctx),
      automatic_(use == AutoSwitch::automatic),
      world_(world),
      graph_(use != AutoSwitch::off && ctx.device().is_cuda() ? std::make_unique<StreamGraph>(ctx.stream)
                                                              : nullptr) {}

void StepGraph::run(const Passes& passes) {
  const bool undecided = graph_ && automatic_ && !trial_;
  // A trace would make the trial one of pieces: it waits until no rank has one.
  const bool due =
      undecided && calls_++ >= kCallsBeforeTrial && sum_over_ranks(ctx_.stream->trace() ? 1.0 : 0.0) == 0;
  if (due) return try_graph(passes);
  turn(passes, undecided ? nullptr : graph_.get());
}

void StepGraph::forget() {
  if (graph_) graph_ = std::make_unique<StreamGraph>(ctx_.stream);
}

void StepGraph::turn(const Passes& passes, StreamGraph* graph, const std::function<void()>& before_launch) {
  const std::function<void()> launch = passes.prepare(false);
  if (graph == nullptr) return launch();
  const std::string shape = passes.shape(), first = shape + ", first of a step";
  if (graph->stats().launched > 0 && !graph->knows(shape) && !graph->knows(first)) tell_of_new_shape(shape);
  graph->run(passes.first_of_step ? first : shape, launch, before_launch);
}

void StepGraph::tell_of_new_shape(const std::string& shape) {
  if (std::exchange(told_of_new_shape_, true)) return;
  notes_.push_back(
      detail::concat("device.cuda_graph: a batch of a new shape (", shape,
                     "): its first turn runs piece by piece, later ones as a graph of their own; the ",
                     StreamGraph::kMostGraphs, " shapes used last keep theirs"));
}

/// Passes several times over, plainly and as a graph, of which the last count: graphs are used from now on if
/// they give the same bits in no more time.
void StepGraph::try_graph(const Passes& passes) {
  GraphTrial trial;
  turn(passes, graph_.get());  // the graph's own first turn, which is plain
  const std::vector<std::uint64_t> expected = passes.result();
  trial.plain_s = seconds_of(passes, nullptr);
  trial.refusal = ctx_.deterministic ? why_not(passes, expected)
                                     : "with device.deterministic: false no bits can be compared; "
                                       "device.cuda_graph: true takes graphs untried";
  if (trial.refusal.empty()) {
    trial.graph_s = seconds_of(passes, graph_.get());
    trial.used = trial.graph_s <= trial.plain_s;
  } else {
    graph_.reset();
    passes.drop();
    turn(passes, nullptr);
  }
  if (!trial.used) graph_.reset();
  notes_.push_back(trial.text());
  trial_ = std::move(trial);
}

double StepGraph::seconds_of(const Passes& passes, StreamGraph* graph) {
  ctx_.stream->synchronize();
  const double begin = now_s();
  for (int i = 0; i < kTimed; ++i) {
    passes.drop();
    turn(passes, graph);
  }
  ctx_.stream->synchronize();
  return sum_over_ranks((now_s() - begin) / kTimed);
}

/// Records the passes, launches them if every rank has recorded its own, and compares. Empty if all went well
/// on all ranks.
std::string StepGraph::why_not(const Passes& passes, const std::vector<std::uint64_t>& expected) {
  std::string why;
  bool told = false, launches = false;
  // Memory must not hold by chance what the graph is to compute: passes over other tokens come in between.
  passes.drop();
  passes.prepare(true)();
  passes.drop();
  try {
    turn(passes, graph_.get(), [&] {
      told = true;
      TESSERA_ENSURE(DeviceError, sum_over_ranks(0) == 0, "another rank could not record its part");
      launches = true;
    });
    if (passes.result() != expected) why = "as a graph the passes gave other numbers";
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

double StepGraph::sum_over_ranks(double value) const { return tessera::sum_over_ranks(host_, world_, value); }

}  // namespace tessera
