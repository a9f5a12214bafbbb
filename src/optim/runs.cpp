#include "optim/runs.hpp"

namespace tessera {

std::vector<Range> runs_of(const Placement& placement, const Segment& segment) {
  const Shape& local = placement.local();
  std::int64_t steps = 1, inner = 1;
  for (int i = 0; i < placement.dim(); ++i) steps *= local[i];
  for (int i = placement.dim() + 1; i < local.rank(); ++i) inner *= local[i];
  const std::int64_t width = local[placement.dim()] * inner;
  std::vector<Range> runs;
  for (std::int64_t step = 0; step < steps; ++step) {
    append(runs, {step * width + segment.local * inner, segment.count * inner});
  }
  return runs;
}

}  // namespace tessera
