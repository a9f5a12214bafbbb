#pragma once
/// Runs of a placed parameter.

#include <vector>

#include "tessera/comm/placement.hpp"
#include "tessera/optim/layout.hpp"

namespace tessera {

/// The local elements of one segment of a placement, in row-major order: one run for each step of the
/// dimensions before the split one.
std::vector<Range> runs_of(const Placement& placement, const Segment& segment);

}  // namespace tessera
