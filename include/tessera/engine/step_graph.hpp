#pragma once
/// Whether and how the passes of a step are launched as one CUDA graph.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/config_words.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/device/graph.hpp"

namespace tessera {

/// What came of trying whether the passes of a step serve better as a graph (AutoSwitch::automatic).
struct GraphTrial {
  bool used = false;                ///< from now on
  std::string refusal;              ///< why they cannot be one; empty if they can
  double plain_s = 0, graph_s = 0;  ///< passes of a batch either way; of all ranks the sums
  std::string recorded = {};        ///< why each call's are recorded anew; empty if they need not be

  /// A line for the log.
  std::string text() const;
};

/// Launches the passes of one call after another: piece by piece, as graphs (AutoSwitch::on), or as a trial
/// on the third call decides (AutoSwitch::automatic), in which they run several times over. A graph is
/// launched as it was recorded where that serves, and recorded anew where not: recorded_because() says why.
class StepGraph {
 public:
  /// Passes that were made ready; one that was recorded is kept, and loaded for later calls.
  class Turn {
   public:
    virtual ~Turn() = default;
    /// Launches them on the stream, which may be recorded.
    virtual void launch() = 0;
    /// They are under way; `repeated`: by a graph that was recorded before, without launch().
    virtual void finish(bool repeated) = 0;
  };

  /// The passes of one call. All of it is called within run().
  struct Passes {
    /// What decides which kernels they launch. Asked first.
    std::function<std::string()> shape;
    /// Makes them ready over the call's batch, or over another one of its shape.
    std::function<std::unique_ptr<Turn>(bool other)> make;
    /// Makes them ready to be recorded, so that load() can follow: what they share with the host gets its
    /// memory from this context, and stays where it is.
    std::function<std::unique_ptr<Turn>(const ExecCtx& lasting)> make_repeatable;
    /// Why a recorded turn cannot be made the call's; empty if it can.
    std::function<std::string(Turn&)> why_not;
    /// Makes it the call's, by writing to the device's memory. After why_not().
    std::function<void(Turn&)> load;
    /// Why no turn of this engine can be loaded; empty if they can.
    std::string never = {};
    std::int64_t call = 0;  ///< of the step, from 0; calls of one number compute the same samples of it
    /// Whether what other ranks send for them, weights of the last update, is still on its way, ...
    std::function<bool()> coming;
    /// ... and what makes the stream wait for it. They wait themselves where each is first read.
    std::function<void()> await;
    /// Forgets the gradient they left.
    std::function<void()> drop;
    /// What they computed on this rank, as numbers whose bits tell whether it has changed.
    std::function<std::vector<std::uint64_t>()> result;
  };

  /// `world`: ranks that decide alike; it outlives this. Never a graph on the CPU.
  StepGraph(const ExecCtx& ctx, AutoSwitch use, Communicator& world);

  /// Collective where there may be a graph. Errors: what the passes throw.
  void run(const Passes& passes);
  /// The next passes do other work than those before, whose first turn is not recorded.
  void forget();

  /// Nothing until the third call with AutoSwitch::automatic on a GPU, in which it happens.
  const std::optional<GraphTrial>& trial() const { return trial_; }
  /// How passes were launched; all zeros without a graph.
  StreamGraph::Stats stats() const { return graph_ ? graph_->stats() : StreamGraph::Stats(); }
  /// Why the latest graph that was not launched as it stood had to be recorded; empty if there was none.
  const std::string& recorded_because() const { return recorded_because_; }
  /// What a log should say since the last call: the trial's outcome; once, that a batch of a new shape runs
  /// piece by piece for a turn.
  std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

 private:
  /// What ranks do with passes: all the same, as NCCL wants calls of a group out of graphs that were recorded
  /// together, or all of them plain.
  enum class How { plain, record, repeat };
  /// A turn whose passes are in the graph, the memory they took, and which recording of all ranks it was.
  struct Recorded {
    std::unique_ptr<Turn> turn;
    std::shared_ptr<MemoryUse> memory;
    std::int64_t number = 0;
  };
  void turn(const Passes& passes, StreamGraph* graph, const std::function<void()>& before_launch = nullptr);
  const Recorded* find(const Passes& passes, const std::string& key, std::string& why) const;
  How agree(bool known, std::int64_t number) const;
  void repeat(const Passes& passes, const std::string& key, const Recorded& recorded);
  void record(const Passes& passes, const std::string& key, bool to_repeat, std::uint64_t lasting,
              const StreamGraph::Options& options);
  void drop_graph();
  void tell_of_new_shape(const std::string& shape);
  void try_graph(const Passes& passes);
  double seconds_of(const Passes& passes, StreamGraph* graph);
  std::string why_not(const Passes& passes, const std::vector<std::uint64_t>& expected);
  bool differs(const Passes& passes, const std::vector<std::uint64_t>& expected) const;
  double sum_over_ranks(double value) const;

  ExecCtx ctx_, host_ = ExecCtx::cpu(1);
  bool automatic_;
  Communicator& world_;
  std::unique_ptr<StreamGraph> graph_;  ///< null where there will be none
  /// Its allocator is its own: what lasts as long as a recording must not lie where another one computes.
  std::optional<ExecCtx> lasting_;
  std::map<std::string, Recorded> recorded_;
  std::int64_t recordings_ = 0;  ///< that ranks made together
  std::string recorded_because_;
  std::uint64_t allocations_ = 0;  ///< before the latest turn
  std::int64_t calls_ = 0;
  std::optional<GraphTrial> trial_;
  std::string first_shape_;
  bool told_of_new_shape_ = false;
  std::vector<std::string> notes_;
};

}  // namespace tessera
