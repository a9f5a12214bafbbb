#pragma once
/// The part of a plan that says how much memory a rank needs; `advise` tries many layouts with it alone.

#include "engine/plan_activations.hpp"
#include "engine/plan_declared.hpp"

namespace tessera::detail {

/// A plan with configuration, mesh, micro-batches and schedule, and nothing else. Errors: as make_plan.
Plan plan_layout(const Config& config, std::optional<std::int64_t> processes);

/// Memory of one tensor rank of one stage, the same for all its data ranks.
std::vector<MemoryTerm> memory_of_stage(const Plan& plan, const DeclaredRank& declared,
                                        const Activations& activations, int stage);

}  // namespace tessera::detail
