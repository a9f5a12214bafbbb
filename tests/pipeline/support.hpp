#pragma once
/// What the tests of this floor share.

#include <string>
#include <vector>

#include "tessera/pipeline/schedule.hpp"

namespace tessera::test {

using Kind = Action::Kind;

inline const std::vector<PipelineSchedule> kSchedules = [] {
  std::vector<PipelineSchedule> all;
  for (const ScheduleTraits& traits : kScheduleTraits) all.push_back(traits.kind);
  return all;
}();

/// Which numbers a schedule is there for.
inline bool is_possible(PipelineSchedule kind, int stages, int chunks, int micro_batches, bool forward_only) {
  return chunk_fault(kind, chunks).empty() &&
         (forward_only || !traits_of(kind).whole_rounds || micro_batches % stages == 0);
}

/// "1f1b p3 v1 m4", for messages.
inline std::string describe(const Schedule& schedule) {
  return std::string(name_of(schedule.kind)) + " p" + std::to_string(schedule.stages) + " v" +
         std::to_string(schedule.chunks) + " m" + std::to_string(schedule.micro_batches) +
         (schedule.forward_only ? " forward only" : "");
}

/// Calls `function` for every possible schedule of up to these sizes.
template <typename F>
void for_all_schedules(int most_stages, int most_chunks, int most_micro_batches, F&& function) {
  for (const PipelineSchedule kind : kSchedules)
    for (int p = 1; p <= most_stages; ++p)
      for (int v = 1; v <= most_chunks; ++v)
        for (int m = 1; m <= most_micro_batches; ++m)
          for (const bool forward_only : {false, true})
            if (is_possible(kind, p, v, m, forward_only))
              function(make_schedule(kind, p, v, m, forward_only));
}

}  // namespace tessera::test
