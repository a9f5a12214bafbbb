#pragma once
#include "engine/stage.hpp"
#include "engine/step_memory.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/ops/spans.hpp"
#include "tessera/tensor/host_copy.hpp"

namespace tessera {

/// Passes whose loss was not read yet.
struct Engine::PassesUnderWay {
  std::vector<LossTerm> terms;
  std::vector<HostCopy> sums;  ///< of each term, on this rank
  Spans forward, backward, stalls;
  std::vector<ExecutedAction> executed;
  std::uint64_t launched = 0;  ///< operations of the flight recorder so far
};

/// Passes of the model's own loss over a batch, and what a graph of them needs to be launched for later ones.
class Engine::PassesTurn final : public StepGraph::Turn {
 public:
  using Outcome = std::optional<PassesUnderWay>;
  PassesTurn(Engine& engine, std::shared_ptr<const Batch> batch, Outcome& outcome);
  /// Repeatable: what the host writes and reads has memory of `lasting`.
  PassesTurn(Engine& engine, std::shared_ptr<const Batch> batch, Outcome& outcome, const ExecCtx& lasting);
  void launch() override;
  void finish(bool repeated) override;
  /// Why they cannot be made those of another batch; empty if they can, and load() is to do it.
  std::string why_not(const Batch& batch);
  void load(Outcome& outcome);

 private:
  /// A call that these passes are to be made for.
  struct Next {
    StepMemory::Values values;
    std::vector<LossTerm> terms;
    int micro_batches = 0;
  };
  StepMemory::Values values_of(const Stage& stage) const;
  /// What else they have from the host: numbers, and where weights and gradients are.
  std::vector<std::uint64_t> found() const;

  Engine& engine_;
  std::shared_ptr<const Batch> batch_;
  Outcome* outcome_;
  std::unique_ptr<StepMemory> memory_;  ///< null: not repeatable
  std::shared_ptr<DeviceClock> clock_;
  std::vector<std::uint64_t> found_;
  std::unique_ptr<Stage> stage_;
  std::vector<LossTerm> terms_;
  Spans stalls_;
  std::vector<ExecutedAction> executed_;
  Next next_;
};

}  // namespace tessera
