#include "tessera/pipeline/schedule.hpp"

#include <algorithm>
#include <iterator>

#include "pipeline/generators.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

namespace {

constexpr std::int64_t kMostPasses = 100'000'000;

void check_numbers(PipelineSchedule kind, const ScheduleSize& size, bool forward_only) {
  const auto [stages, chunks, micro_batches] = size;
  const std::string_view name = name_of(kind);
  TESSERA_ENSURE(ConfigError, stages >= 1 && chunks >= 1 && micro_batches >= 1, "schedule ", name,
                 " needs at least one stage, one chunk and one micro-batch, not ", stages, ", ", chunks,
                 " and ", micro_batches);
  const double passes = 3.0 * stages * chunks * micro_batches;
  TESSERA_ENSURE(ConfigError, passes <= static_cast<double>(kMostPasses), stages, " stages of ", chunks,
                 " chunks with ", micro_batches, " micro-batches make a schedule of ", passes,
                 " passes; the most is ", kMostPasses, ". Use fewer or larger micro-batches");
  const std::string fault = chunk_fault(kind, chunks);
  TESSERA_ENSURE(ConfigError, fault.empty(), fault);
  TESSERA_ENSURE(ConfigError, forward_only || !traits_of(kind).whole_rounds || micro_batches % stages == 0,
                 "schedule ", name, " needs micro-batches in multiples of the ", stages,
                 " pipeline stages, not ", micro_batches,
                 "; change training.global_batch_size or training.micro_batch_size, or use 1f1b");
}

Table make_table(PipelineSchedule kind, const ScheduleSize& size, bool forward_only) {
  const ScheduleTraits& traits = traits_of(kind);
  if (forward_only) return traits.folded ? make_folded_forwards(size) : make_forwards(size);
  if (size.stages == 1) return make_single_stage(size, traits.splits_backward);
  const auto* found = std::ranges::find(kGenerators, kind, &Generator::kind);
  TESSERA_ENSURE(InternalError, found != std::end(kGenerators), "schedule ", traits.name,
                 " has no generator");
  return found->make(size);
}

}  // namespace

int Schedule::stage_of(int piece) const {
  TESSERA_CHECK(piece >= 0 && piece < pieces(), "piece ", piece, " of ", pieces());
  const int place = piece % stages;
  return traits_of(kind).folded && chunk_of(piece) == 1 ? stages - 1 - place : place;
}

int Schedule::chunk_of(int piece) const {
  TESSERA_CHECK(piece >= 0 && piece < pieces(), "piece ", piece, " of ", pieces());
  return piece / stages;
}

int Schedule::piece_of(int stage, int chunk) const {
  TESSERA_CHECK(stage >= 0 && stage < stages, "stage ", stage, " of ", stages);
  TESSERA_CHECK(chunk >= 0 && chunk < chunks, "chunk ", chunk, " of ", chunks);
  const bool back = traits_of(kind).folded && chunk == 1;
  return chunk * stages + (back ? stages - 1 - stage : stage);
}

Schedule make_schedule(PipelineSchedule kind, int stages, int chunks, int micro_batches, bool forward_only) {
  const ScheduleSize size{stages, chunks, micro_batches};
  check_numbers(kind, size, forward_only);
  return {kind, stages, chunks, micro_batches, forward_only, make_table(kind, size, forward_only)};
}

}  // namespace tessera
