#include "pipeline/generators.hpp"

#include <algorithm>

namespace tessera {

namespace {

using Kind = Action::Kind;

/// The k-th pass through a stage whose chunks take turns in groups of `stages` micro-batches (the last group
/// may be smaller). Backward visits the chunks from last to first.
Action interleaved_pass(const ScheduleSize& size, Kind kind, int k) {
  const int group = k / (size.stages * size.chunks);
  const int first = group * size.stages;
  const int members = std::min(size.stages, size.micro_batches - first);
  const int within = k - first * size.chunks;
  const int turn = within / members;
  const int chunk = kind == Kind::forward ? turn : size.chunks - 1 - turn;
  return {kind, chunk, first + within % members};
}

/// `warmup` forwards, then a forward and a backward in turn, then the backwards that are left.
Column alternate(const ScheduleSize& size, int warmup) {
  const int total = size.chunks * size.micro_batches;
  Column column;
  for (int k = 0; k < total + warmup; ++k) {
    if (k < total) column.push_back(interleaved_pass(size, Kind::forward, k));
    if (k >= warmup) column.push_back(interleaved_pass(size, Kind::backward, k - warmup));
  }
  return column;
}

}  // namespace

Table make_gpipe(const ScheduleSize& size) {
  return Table(static_cast<std::size_t>(size.stages), alternate(size, size.micro_batches));
}

Table make_one_f_one_b(const ScheduleSize& size) {
  Table table;
  for (int stage = 0; stage < size.stages; ++stage) {
    table.push_back(alternate(size, std::min(size.stages - stage - 1, size.micro_batches)));
  }
  return table;
}

Table make_interleaved(const ScheduleSize& size) {
  Table table;
  for (int stage = 0; stage < size.stages; ++stage) {
    const int warmup = 2 * (size.stages - stage - 1) + (size.chunks - 1) * size.stages;
    table.push_back(alternate(size, std::min(warmup, size.chunks * size.micro_batches)));
  }
  return table;
}

Table make_single_stage(const ScheduleSize& size, bool split) {
  Column column;
  for (int micro_batch = 0; micro_batch < size.micro_batches; ++micro_batch) {
    for (int chunk = 0; chunk < size.chunks; ++chunk) column.push_back({Kind::forward, chunk, micro_batch});
    for (int chunk = size.chunks - 1; chunk >= 0; --chunk) {
      column.push_back({split ? Kind::input_gradient : Kind::backward, chunk, micro_batch});
      if (split) column.push_back({Kind::weight_gradient, chunk, micro_batch});
    }
  }
  return {std::move(column)};
}

Table make_forwards(const ScheduleSize& size) {
  Column column;
  for (int k = 0; k < size.chunks * size.micro_batches; ++k) {
    column.push_back(interleaved_pass(size, Kind::forward, k));
  }
  return Table(static_cast<std::size_t>(size.stages), std::move(column));
}

}  // namespace tessera
