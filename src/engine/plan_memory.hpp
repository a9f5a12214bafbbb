#pragma once
/// The part of a plan that says how much memory a rank needs; `advise` tries many layouts with it alone.

#include "engine/plan_activations.hpp"
#include "engine/plan_declared.hpp"

namespace tessera::detail {

/// A plan with configuration, mesh, micro-batches and schedule, and nothing else: training.recompute may be
/// auto in it. Errors: as make_plan.
Plan plan_layout(const Config& config, std::optional<std::int64_t> processes);

/// Memory of one tensor rank of one stage, which holds `pieces`; the same for all its data ranks.
std::vector<MemoryTerm> memory_of_stage(const Plan& plan, int stage, const std::vector<ModelPiece>& pieces,
                                        const DeclaredRank& declared, const Activations& activations);

/// What the rank that needs most needs.
struct MostMemory {
  std::int64_t bytes = 0, persistent_bytes = 0;
};

/// Memory of a plan_layout's ranks, for any way to recompute: all that does not depend on that is found once.
/// The first tensor rank has the largest parts, so only it is looked at. Both arguments outlive this.
class LayoutMemory {
 public:
  LayoutMemory(const Plan& layout, const PaperGroup& tensor);
  /// `training` differs from the layout's in its recompute keys alone, and they are settled.
  MostMemory with(const TrainingConfig& training) const;
  std::int64_t most_layers() const { return most_layers_; }  ///< of a piece

 private:
  const Plan& layout_;
  std::vector<std::vector<ModelPiece>> pieces_;  // by stage, as the next
  std::vector<DeclaredRank> declared_;
  std::int64_t most_layers_ = 0;
};

/// How to recompute on `layout` (a plan_layout) so that every rank needs at most `limit`.
RecomputeChoice choose_recompute(const Plan& layout, MemoryLimit limit);
/// `training` with these options.
TrainingConfig with_recompute(TrainingConfig training, const RecomputeOptions& options);

}  // namespace tessera::detail
