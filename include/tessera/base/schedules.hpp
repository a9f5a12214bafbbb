#pragma once
/// The pipeline schedules, and what each asks of a layout: the one place for both. Their tables of passes are
/// made on floor pipeline.

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

enum class PipelineSchedule { gpipe, one_f_one_b, interleaved, zb_h1, zb_v };

struct ScheduleTraits {
  PipelineSchedule kind;
  std::string_view name;  ///< in YAML
  enum class Chunks { one, two, several };
  Chunks chunks = Chunks::one;   ///< model chunks of a stage
  bool splits_backward = false;  ///< weight gradients are passes of their own
  bool whole_rounds = false;     ///< micro-batches come in multiples of the stages
  bool folded = false;           ///< the second chunks run from the last stage back to the first
};

inline constexpr ScheduleTraits kScheduleTraits[] = {
    {.kind = PipelineSchedule::gpipe, .name = "gpipe"},
    {.kind = PipelineSchedule::one_f_one_b, .name = "1f1b"},
    {.kind = PipelineSchedule::interleaved,
     .name = "interleaved",
     .chunks = ScheduleTraits::Chunks::several,
     .whole_rounds = true},
    {.kind = PipelineSchedule::zb_h1, .name = "zb-h1", .splits_backward = true},
    {.kind = PipelineSchedule::zb_v,
     .name = "zb-v",
     .chunks = ScheduleTraits::Chunks::two,
     .splits_backward = true,
     .folded = true},
};

constexpr const ScheduleTraits& traits_of(PipelineSchedule kind) {
  return kScheduleTraits[static_cast<int>(kind)];
}
constexpr std::string_view name_of(PipelineSchedule kind) { return traits_of(kind).name; }

/// The chunks per stage of a layout with so many `virtual_stages`: 1 leaves them to the schedule.
constexpr std::int64_t chunks_of(PipelineSchedule kind, std::int64_t virtual_stages) {
  const bool two = traits_of(kind).chunks == ScheduleTraits::Chunks::two;
  return two && virtual_stages == 1 ? 2 : virtual_stages;
}
/// Why a schedule cannot have so many chunks per stage; empty where it can.
std::string chunk_fault(PipelineSchedule kind, std::int64_t chunks);

}  // namespace tessera
