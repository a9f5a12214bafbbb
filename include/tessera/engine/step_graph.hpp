#pragma once
/// Whether and how the passes of a step are launched as one CUDA graph.

#include <cstdint>
#include <functional>
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

  /// A line for the log.
  std::string text() const;
};

/// Launches the passes of one call after another: piece by piece, as graphs (AutoSwitch::on), or as a trial
/// on the third call decides (AutoSwitch::automatic), in which they run several times over.
class StepGraph {
 public:
  /// The passes of one call. All of it is called within run().
  struct Passes {
    bool first_of_step = true;  ///< others add to a gradient that is there
    /// Makes them ready over the call's batch, or over another one of its shape; what it returns launches
    /// them.
    std::function<std::function<void()>(bool other)> prepare;
    /// What decides which kernels they launch; asked after prepare().
    std::function<std::string()> shape;
    /// Forgets the gradient they left.
    std::function<void()> drop;
    /// What they computed on this rank, as numbers whose bits tell whether it has changed.
    std::function<std::vector<std::uint64_t>()> result;
  };

  /// `world`: ranks that decide alike; it outlives this. Never a graph on the CPU.
  StepGraph(const ExecCtx& ctx, AutoSwitch use, Communicator& world);

  /// Collective in a trial. Errors: what the passes throw.
  void run(const Passes& passes);
  /// The next passes do other work than those before, whose first turn is not recorded.
  void forget();

  /// Nothing until the third call with AutoSwitch::automatic on a GPU, in which it happens.
  const std::optional<GraphTrial>& trial() const { return trial_; }
  /// How passes were launched; all zeros without a graph.
  StreamGraph::Stats stats() const { return graph_ ? graph_->stats() : StreamGraph::Stats(); }
  /// What a log should say since the last call: the trial's outcome; once, that a batch of a new shape runs
  /// piece by piece for a turn.
  std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

 private:
  void turn(const Passes& passes, StreamGraph* graph, const std::function<void()>& before_launch = nullptr);
  void tell_of_new_shape(const std::string& shape);
  void try_graph(const Passes& passes);
  double seconds_of(const Passes& passes, StreamGraph* graph);
  std::string why_not(const Passes& passes, const std::vector<std::uint64_t>& expected);
  double sum_over_ranks(double value) const;

  ExecCtx ctx_, host_ = ExecCtx::cpu(1);
  bool automatic_;
  Communicator& world_;
  std::unique_ptr<StreamGraph> graph_;  ///< null where there will be none
  std::int64_t calls_ = 0;
  std::optional<GraphTrial> trial_;
  bool told_of_new_shape_ = false;
  std::vector<std::string> notes_;
};

}  // namespace tessera
