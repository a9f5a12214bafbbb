#pragma once
/// Dry runs of a plan's ranks. What is alike is run once: `advise` and `recompute: auto` look at many
/// layouts.

#include <map>
#include <memory>
#include <string>

#include "engine/dry_terms.hpp"
#include "tessera/engine/plan.hpp"

namespace tessera::detail {

/// Whether a run would compute on CPUs. What is planned for CUDA need not have it.
bool is_for_cpu(const DeviceConfig& config);

/// A plan with configuration, mesh and micro-batches, and nothing else: training.recompute may be auto in it.
/// Errors: as make_plan.
Plan plan_layout(const Config& config, std::optional<std::int64_t> processes);

/// The passes of a rank's pieces, and what comes with them.
struct RankPasses {
  std::vector<PieceRecord> pieces;
  std::int64_t tables = 0, batch_bytes = 0, host_bytes = 0;  ///< the last of each micro-batch in flight
  WalkShards walk = nullptr;  ///< where data ranks share out more than what a step does once
};
/// What of a rank does not depend on its passes.
struct RankStore {
  std::int64_t parameters = 0;
  std::vector<MemoryTerm> persistent;
  WorkRecord once;
  Elsewhere elsewhere;
};

/// Dry runs by what they depend on. All configurations that are asked about differ in `parallel`, `offload`,
/// micro-batch and recomputation alone.
class DryRuns {
 public:
  const RankPasses& passes(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank);
  /// Of the same rank in every stage with such pieces, but for what depends on the rank's number.
  const RankStore& store(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank);
  /// What each rank sends to agree on a step's batch; `pieces` are those of rank 0.
  static std::int64_t agreement_bytes(const Plan& layout, const std::vector<ModelPiece>& pieces);
  /// What rank `rank` sends once in a step.
  static std::vector<TrafficTerm> once(const Plan& layout, const std::vector<ModelPiece>& pieces, int rank);

  /// The pieces of each stage.
  std::vector<std::vector<ModelPiece>> pieces(const Config& config);

 private:
  std::optional<PartCosts> costs_;
  std::map<std::string, RankPasses> passes_;
  std::map<std::string, RankStore> stores_;
};

/// A rank's memory, and how its stage comes to it.
struct Needs {
  ColumnRecord column;
  std::vector<MemoryTerm> memory;
};
Needs needs_of(const RankPasses& passes, const RankStore& store, const Columns& columns, int stage);

/// What the rank that needs most needs.
struct MostMemory {
  std::int64_t bytes = 0, persistent_bytes = 0;
};

/// Memory of a plan_layout's ranks, for any way to recompute. The first tensor rank has the largest parts, so
/// only it is looked at. Both arguments outlive this.
class LayoutMemory {
 public:
  LayoutMemory(const Plan& layout, DryRuns& runs);
  /// `training` differs from the layout's in its recompute keys alone, and they are settled.
  MostMemory with(const TrainingConfig& training) const;
  /// What stays on the rank that has most of it.
  std::int64_t persistent_bytes() const;
  std::int64_t most_layers() const;  ///< of a piece

 private:
  const Plan& layout_;
  DryRuns& runs_;
  std::vector<std::vector<ModelPiece>> pieces_;  // by stage
  Columns columns_;
};

/// What stays between steps: weights, copies, gradients, optimizer state.
std::int64_t persistent_bytes(const std::vector<MemoryTerm>& terms);

/// How to recompute on `layout` (a plan_layout) so that every rank needs at most `limit`.
RecomputeChoice choose_recompute(const Plan& layout, MemoryLimit limit);
/// `training` with these options.
TrainingConfig with_recompute(TrainingConfig training, const RecomputeOptions& options);

}  // namespace tessera::detail
