/// Zero-bubble schedules: the backward pass is split, and W, for which nobody waits, fills the gaps.

#include <algorithm>
#include <optional>

#include "pipeline/generators.hpp"

namespace tessera {

namespace {

using Kind = Action::Kind;

/// How many passes of each kind a stage has run.
struct Progress {
  int forward = 0, backward = 0, weights = 0;
};

/// What a stage of ZB-H1 runs in a slot of time, given what all stages had done before it.
std::optional<Kind> choose(const std::vector<Progress>& done, std::size_t stage, const ScheduleSize& size) {
  const Progress& own = done[stage];
  const bool first = stage == 0, last = stage + 1 == done.size();
  const int inputs = first ? size.micro_batches : done[stage - 1].forward;
  const int gradients = last ? own.forward : done[stage + 1].backward;
  const int held = own.forward - own.weights;
  const int allowed = own.backward == 0 ? size.stages - static_cast<int>(stage) : size.stages;
  if (own.forward < inputs && held < allowed) return Kind::forward;
  if (own.backward < gradients) return Kind::input_gradient;
  if (own.weights < own.backward) return Kind::weight_gradient;
  return std::nullopt;
}

int& count_of(Progress& progress, Kind kind) {
  if (kind == Kind::forward) return progress.forward;
  return kind == Kind::input_gradient ? progress.backward : progress.weights;
}

/// One stage's column of a schedule with two chunks: each pass is the next one of its kind and chunk.
class ColumnWriter {
 public:
  void forward(int chunk) { add(Kind::forward, chunk); }
  void backward(int chunk) { add(Kind::input_gradient, chunk); }
  void weights(int chunk) { add(Kind::weight_gradient, chunk); }
  const Progress& done(int chunk) const { return done_[chunk]; }
  Column finish() { return std::move(column_); }

 private:
  void add(Kind kind, int chunk) { column_.push_back({kind, chunk, count_of(done_[chunk], kind)++}); }

  Progress done_[2];
  Column column_;
};

Column zb_v_column(int stages, int stage, int total) {
  const int after = stages - stage;  // this stage and those after it
  ColumnWriter column;
  for (int k = 0; k < 2 * after - 1; ++k) column.forward(0);
  for (int k = 0; k < stage; ++k) {
    column.forward(1);
    column.forward(0);
  }
  for (int k = 0; k < after; ++k) {
    column.forward(1);
    column.backward(1);
    column.weights(1);
  }
  while (column.done(1).forward < total) {
    if (column.done(0).forward < total) column.forward(0);
    column.backward(0);
    column.weights(0);
    column.forward(1);
    column.backward(1);
    column.weights(1);
  }
  for (int k = 0; k < stage; ++k) {
    column.backward(0);
    column.backward(1);
  }
  for (int k = 0; k < after; ++k) {
    column.backward(0);
    column.weights(0);
  }
  for (const int chunk : {1, 0}) {
    while (column.done(chunk).weights < total) column.weights(chunk);
  }
  return column.finish();
}

}  // namespace

/// ZB-H1 (Qi et al., "Zero bubble pipeline parallelism"): 1F1B's warm-up, but from its first B on a stage may
/// hold p micro-batches until their W, as stage 0 does under 1F1B. The table is the list schedule for passes
/// of equal length: in each slot of time a stage runs F if its input is there and memory allows, else B, else
/// W. That gives the paper's bubble of (p - 1)(F + B - W).
Table make_zb_h1(const ScheduleSize& size) {
  Table table(static_cast<std::size_t>(size.stages));
  std::vector<Progress> done(table.size());
  const auto unfinished = [&](const Progress& progress) { return progress.weights < size.micro_batches; };
  while (std::any_of(done.begin(), done.end(), unfinished)) {
    const std::vector<Progress> before = done;
    for (std::size_t stage = 0; stage < table.size(); ++stage) {
      const std::optional<Kind> kind = choose(before, stage, size);
      if (kind) table[stage].push_back({*kind, 0, count_of(done[stage], *kind)++});
    }
  }
  return table;
}

/// ZB-V (Qi et al., "Pipeline parallelism with controllable memory"): the second chunks run back through the
/// stages, so the last piece is on stage 0 and its gradient is there at once. Passes of both chunks alternate
/// so that a stage holds at most 2p half-size chunks, what 1F1B holds on stage 0. The order is for at least
/// 2p - 1 micro-batches; fewer take the same order and leave the others out.
Table make_zb_v(const ScheduleSize& size) {
  Table table;
  for (int stage = 0; stage < size.stages; ++stage) {
    table.push_back(zb_v_column(size.stages, stage, std::max(size.micro_batches, 2 * size.stages - 1)));
    std::erase_if(table.back(),
                  [&](const Action& action) { return action.micro_batch >= size.micro_batches; });
  }
  return table;
}

/// Piece k of micro-batch i runs at time 2i + k: on a stage the two chunks' times are of different parity and
/// never collide.
Table make_folded_forwards(const ScheduleSize& size) {
  Table table;
  for (int stage = 0; stage < size.stages; ++stage) {
    Column& column = table.emplace_back();
    const int lead = size.stages - stage;  // micro-batches by which chunk 0 is ahead
    for (int k = 0; k < size.micro_batches + lead; ++k) {
      if (k >= lead) column.push_back({Kind::forward, 1, k - lead});
      if (k < size.micro_batches) column.push_back({Kind::forward, 0, k});
    }
  }
  return table;
}

}  // namespace tessera
