#pragma once
/// The orders of passes, one generator per schedule. Numbers have been checked by make_schedule.

#include <vector>

#include "tessera/pipeline/schedule.hpp"

namespace tessera {

/// p stages, v chunks per stage, m micro-batches.
struct ScheduleSize {
  int stages = 1, chunks = 1, micro_batches = 1;
};
using Column = std::vector<Action>;
using Table = std::vector<Column>;  // per stage

Table make_gpipe(const ScheduleSize& size);
Table make_one_f_one_b(const ScheduleSize& size);
Table make_interleaved(const ScheduleSize& size);
Table make_zb_h1(const ScheduleSize& size);
Table make_zb_v(const ScheduleSize& size);

/// Of each schedule.
struct Generator {
  PipelineSchedule kind;
  Table (*make)(const ScheduleSize& size);
};
inline constexpr Generator kGenerators[] = {{PipelineSchedule::gpipe, make_gpipe},
                                            {PipelineSchedule::one_f_one_b, make_one_f_one_b},
                                            {PipelineSchedule::interleaved, make_interleaved},
                                            {PipelineSchedule::zb_h1, make_zb_h1},
                                            {PipelineSchedule::zb_v, make_zb_v}};

/// One stage: every micro-batch forward and backward through all chunks; `split`: W as a pass of its own.
Table make_single_stage(const ScheduleSize& size, bool split);

/// Evaluation: forwards only.
Table make_forwards(const ScheduleSize& size);
Table make_folded_forwards(const ScheduleSize& size);

}  // namespace tessera
