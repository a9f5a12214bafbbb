/// training.recompute auto: the cheapest way to recompute whose memory every rank has.

#include <limits>

#include "engine/plan_memory.hpp"
#include "tessera/engine/build.hpp"

namespace tessera::detail {
namespace {

/// The ways to recompute on one layout.
class Candidates {
 public:
  explicit Candidates(const Plan& layout) : training_(layout.config.training), memory_(layout, runs_) {}

  RecomputeCandidate with(const RecomputeOptions& options) const {
    return {options, memory_.with(with_recompute(training_, options)).bytes};
  }

  /// Full recomputation with the fewest `recompute_layers` that need at most `enough`, or those that need
  /// least. All are tried: what a segment needs while it is computed again may grow with them.
  RecomputeCandidate full(RecomputeMethod method, std::int64_t enough) const {
    RecomputeCandidate least{{}, std::numeric_limits<std::int64_t>::max()};
    for (std::int64_t n = 1; n <= memory_.most_layers() && least.memory_bytes > enough; ++n) {
      const RecomputeCandidate next = with({.what = Recompute::full, .method = method, .layers = n});
      if (next.memory_bytes < least.memory_bytes) least = next;
    }
    return least;
  }

 private:
  TrainingConfig training_;
  DryRuns runs_;
  LayoutMemory memory_;
};

}  // namespace

TrainingConfig with_recompute(TrainingConfig training, const RecomputeOptions& options) {
  training.recompute = options.what;
  training.recompute_method = options.method;
  training.recompute_layers = options.layers;
  training.recompute_partition = options.partition;
  return training;
}

RecomputeChoice choose_recompute(const Plan& layout, MemoryLimit limit) {
  const Candidates candidates(layout);
  RecomputeChoice choice{.limit = std::move(limit), .tried = {}, .chosen = {}};
  const auto fits = [&](const RecomputeCandidate& candidate) {
    choice.tried.push_back(candidate);
    if (choice.tried.size() == 1 || candidate.memory_bytes < choice.chosen.memory_bytes)
      choice.chosen = candidate;
    return choice.fits();
  };
  // Uniform segments all cost one forward pass, so of them only the smallest counts.
  fits(candidates.with({.what = Recompute::none})) || fits(candidates.with({.what = Recompute::selective})) ||
      fits(candidates.full(RecomputeMethod::block, choice.limit.bytes)) ||
      fits(candidates.full(RecomputeMethod::uniform, 0));
  return choice;
}

}  // namespace tessera::detail
