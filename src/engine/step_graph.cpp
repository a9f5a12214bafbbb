#include "tessera/engine/step_graph.hpp"

#include <array>
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
/// Calls of a step that have graphs of their own: samples, which key dropout, are numbered on. Later ones
/// share one, which is recorded for each. With the one of passes whose weights are on their way two shapes
/// find room (StreamGraph::kMostGraphs).
constexpr std::int64_t kOwnGraphs = 3;
/// A trial takes no graph whose passes need more of the time that ranks wait for each other.
constexpr double kMostOfTimeout = 0.25;

std::string key_of(const std::string& shape, std::int64_t call, bool coming) {
  if (coming) return shape + ", with weights on their way";
  if (call == 0) return shape + ", first of a step";
  return call < kOwnGraphs ? detail::concat(shape, ", call ", call, " of a step") : shape;
}

/// What is allocated while this is there.
class MemoryScope {
 public:
  MemoryScope(const std::shared_ptr<CachingAllocator>& allocator, std::uint64_t lasting)
      : allocator_(allocator), use_(allocator->begin_use(lasting)) {}
  ~MemoryScope() { allocator_->end_use(*use_); }
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  const std::shared_ptr<MemoryUse>& use() const { return use_; }

 private:
  std::shared_ptr<CachingAllocator> allocator_;
  std::shared_ptr<MemoryUse> use_;
};

}  // namespace

std::string GraphTrial::text() const {
  if (!refusal.empty()) return "device.cuda_graph: off, " + refusal;
  std::ostringstream out;
  out << "device.cuda_graph: " << (used ? "on" : "off") << ", passes take " << std::setprecision(3)
      << graph_s / plain_s << " of the time as a graph";
  if (used && !recorded.empty()) out << ", recorded anew for each call: " << recorded;
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
  const bool used = graph_ != nullptr;
  drop_graph();
  if (used) graph_ = std::make_unique<StreamGraph>(ctx_.stream);
}

void StepGraph::drop_graph() {
  recorded_.clear();
  graph_.reset();
  first_shape_.clear();
}

void StepGraph::turn(const Passes& passes, StreamGraph* graph, const std::function<void()>& before_launch) {
  const std::string shape = passes.shape();
  const bool first = passes.call == 0;
  // What was there before the turn before this one, and is there now, is not of steps under way: it lasts.
  const std::uint64_t lasting = std::exchange(allocations_, ctx_.allocator->stats().allocations);
  if (graph == nullptr) {
    const std::unique_ptr<Turn> turn = passes.make(false);
    turn->launch();
    return turn->finish(false);
  }
  // A graph that waits for them is another one each time. Where they have come nothing is lost by waiting
  // before it; where not, the GPU is behind the host, which has time to record.
  const bool coming = passes.coming();
  if (!coming) passes.await();
  const std::string key = key_of(shape, first || passes.never.empty() ? passes.call : kOwnGraphs, coming);
  if (first_shape_.empty()) first_shape_ = shape;
  if (shape != first_shape_) tell_of_new_shape(shape);
  std::string why = coming ? "weights of the last update were still on their way" : passes.never;
  const Recorded* const recorded = why.empty() ? find(passes, key, why) : nullptr;
  const bool known = graph->knows(key) && !ctx_.stream->trace();
  const How how = agree(known, recorded != nullptr ? recorded->number : 0);
  if (how == How::repeat) return repeat(passes, key, *recorded);
  if (recorded != nullptr) why = "another rank could not launch its own again";
  if (how == How::record) ++recordings_;
  const std::uint64_t launched = graph->stats().launched;
  const bool to_repeat = how == How::record && !coming && passes.never.empty();
  record(passes, key, to_repeat, lasting,
         {.before_launch = before_launch, .lasting = to_repeat, .plain = how == How::plain});
  if (graph->stats().launched > launched) recorded_because_ = std::move(why);
}

/// What could be launched as it was recorded; null, and why not, if there is nothing.
const StepGraph::Recorded* StepGraph::find(const Passes& passes, const std::string& key,
                                           std::string& why) const {
  const auto known = recorded_.find(key);
  if (known == recorded_.end() || !graph_->can_replay(key)) {
    why = "it had not been recorded before";
  } else if (!ctx_.allocator->may_use(*known->second.memory)) {
    why = "others hold memory that it computes in, or memory that it reads was released";
  } else {
    why = passes.why_not(*known->second.turn);
  }
  return why.empty() ? &known->second : nullptr;
}

/// What all ranks can do. `known`: a graph can be recorded here; `number`: of the recording that can be
/// launched here, 0 if there is none. Collective.
StepGraph::How StepGraph::agree(bool known, std::int64_t number) const {
  std::array<std::int64_t, 3> most{known ? 0 : 1, number, -number};
  if (world_.size() > 1) {
    const Tensor words = Tensor::wrap(most.data(), {most.size()}, DType::i64);
    world_.all_reduce(host_, words, ReduceOp::max).wait(host_);
  }
  const auto [unknown, last, first] = most;
  if (unknown > 0) return How::plain;
  return last > 0 && last == -first ? How::repeat : How::record;
}

/// Launches the graph as it was recorded.
void StepGraph::repeat(const Passes& passes, const std::string& key, const Recorded& recorded) {
  passes.load(*recorded.turn);
  TESSERA_ENSURE(InternalError, graph_->replay(key), "the graph of ", key, " is gone");
  recorded.turn->finish(true);
}

/// Runs the passes piece by piece or as a graph that is recorded now; `to_repeat`: keeps what repeat() needs.
void StepGraph::record(const Passes& passes, const std::string& key, bool to_repeat, std::uint64_t lasting,
                       const StreamGraph::Options& options) {
  Recorded made;
  const auto launch = [&] { made.turn->launch(); };
  if (!to_repeat) {
    made.turn = passes.make(false);
    graph_->run(key, launch, options);
    return made.turn->finish(false);
  }
  recorded_.erase(key);
  if (!lasting_) {
    lasting_ = ctx_;
    lasting_->allocator = std::make_shared<CachingAllocator>(ctx_.stream);
  }
  made.turn = passes.make_repeatable(*lasting_);
  {
    const MemoryScope memory(ctx_.allocator, lasting);
    made.memory = memory.use();
    graph_->run(key, launch, options);
  }
  made.turn->finish(false);
  made.number = recordings_;
  if (graph_->can_replay(key)) recorded_.insert_or_assign(key, std::move(made));
  std::erase_if(recorded_, [&](const auto& each) { return !graph_->knows(each.first); });
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
  trial.recorded = passes.never;
  passes.await();              // all that follows is the same on all ranks
  turn(passes, graph_.get());  // the graph's own first turn, which is plain
  const std::vector<std::uint64_t> expected = passes.result();
  trial.plain_s = seconds_of(passes, nullptr);
  trial.refusal = ctx_.deterministic ? why_not(passes, expected)
                                     : "with device.deterministic: false no bits can be compared; "
                                       "device.cuda_graph: true takes graphs untried";
  if (trial.refusal.empty()) {
    trial.graph_s = seconds_of(passes, graph_.get());
    trial.used = trial.graph_s <= trial.plain_s;
    const double timeout_s = world_.options().timeout_s;
    if (world_.size() > 1 && trial.graph_s / world_.size() > kMostOfTimeout * timeout_s)
      trial.refusal = detail::concat("ranks wait ", timeout_s, " s for each other, in a graph for all of it");
    if (differs(passes, expected)) trial.refusal = "launched once more it gave other numbers";
  }
  if (!trial.refusal.empty()) {
    trial.used = false;
    drop_graph();
    passes.drop();
    turn(passes, nullptr);
  }
  if (!trial.used) drop_graph();
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
  passes.make(true)->launch();
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

/// Whether the passes of some rank gave other numbers than these. Collective.
bool StepGraph::differs(const Passes& passes, const std::vector<std::uint64_t>& expected) const {
  return sum_over_ranks(passes.result() != expected ? 1 : 0) > 0;
}

double StepGraph::sum_over_ranks(double value) const { return tessera::sum_over_ranks(host_, world_, value); }

}  // namespace tessera
