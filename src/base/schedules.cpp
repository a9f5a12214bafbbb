#include "tessera/base/schedules.hpp"

#include "tessera/base/error.hpp"

namespace tessera {

std::string chunk_fault(PipelineSchedule kind, std::int64_t chunks) {
  using Chunks = ScheduleTraits::Chunks;
  const ScheduleTraits& traits = traits_of(kind);
  if (traits.chunks == Chunks::several && chunks < 2) {
    return detail::concat("parallel.virtual_stages must be at least 2 for schedule ", traits.name, ", not ",
                          chunks, "; or use schedule 1f1b");
  }
  if (traits.chunks == Chunks::two && chunks != 2) {
    return detail::concat("parallel.virtual_stages is ", chunks, ", but schedule ", traits.name,
                          " has 2 always; leave it out");
  }
  if (traits.chunks == Chunks::one && chunks != 1) {
    return detail::concat("parallel.virtual_stages is ", chunks, ", but schedule ", traits.name,
                          " has one model chunk per stage; use schedule interleaved");
  }
  return {};
}

static_assert(
    [] {
      int place = 0;
      for (const ScheduleTraits& traits : kScheduleTraits)
        if (static_cast<int>(traits.kind) != place++) return false;
      return true;
    }(),
    "kScheduleTraits has a line for each schedule, in their order");

}  // namespace tessera
