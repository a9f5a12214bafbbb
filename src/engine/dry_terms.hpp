#pragma once
/// How what was recorded of passes becomes what a rank needs for a step.

#include "tessera/engine/dry_run.hpp"

namespace tessera::detail {

/// That of `samples` samples of a run.
MicroBatchSize size_of(const Config& config, std::int64_t samples);

/// Adds to the term of that axis and name, or makes one; nothing for 0 bytes.
void add_traffic(std::vector<TrafficTerm>& terms, const TrafficTerm& more);

/// Moves what crosses the device's link from `terms`, which then hold what goes to other ranks, to
/// `elsewhere`.
void take_crossed(std::vector<TrafficTerm>& terms, Elsewhere& elsewhere);

/// The columns of a step of any length. What grows with the micro-batches does so evenly once all stages are
/// busy, so long steps are told by two shorter ones.
class Columns {
 public:
  /// Errors: as make_schedule.
  Columns(PipelineSchedule kind, int stages, int chunks, std::int64_t micro_batches);
  ColumnRecord run(int stage, const std::vector<PieceRecord>& pieces, std::int64_t batch_bytes,
                   const WalkShards& walk) const;

 private:
  std::int64_t micro_batches_;
  std::vector<Schedule> schedules_;  // one, or a shorter and a longer one
};

/// Relative. A byte that a kernel moves counts as one operation, so that an embedding alone is not free.
double time_of(const WorkRecord& work);
/// What parts of the model of `config` cost for one sample, on one rank, nothing recomputed.
PartCosts part_costs(const Config& config);

/// Persistent parts, and the peak of a step beside them: that of its passes, or of what comes `once`.
std::vector<MemoryTerm> memory_of(std::vector<MemoryTerm> persistent, const ColumnRecord& column,
                                  std::int64_t once);
/// Of the passes of a step.
std::vector<TrafficTerm> traffic_of(const std::vector<PieceRecord>& pieces, std::int64_t micro_batches,
                                    const ColumnRecord& column);

}  // namespace tessera::detail
