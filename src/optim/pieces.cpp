// What a rank counts, updates and saves of each parameter.

#include <algorithm>
#include <map>

#include "optim/runs.hpp"
#include "tessera/optim/param_store.hpp"

namespace tessera {

StateValues StateValues::narrow(std::int64_t begin, std::int64_t count) const {
  if (source) return {.source = source, .run = {run.begin + begin, count}};
  return {values.narrow(0, begin, count), low ? low.narrow(0, begin, count) : Tensor()};
}

Tensor StateValues::read(const ExecCtx& ctx) const {
  if (source) {
    const Tensor host = Tensor::empty(ExecCtx::cpu(1), {run.count}, DType::f32);
    source->read(run, static_cast<float*>(host.raw()));
    return host;
  }
  if (!low) return values;
  Tensor main = Tensor::empty(ctx, values.shape(), DType::f32);
  ops::join_main(ctx, values, low, main);
  return main;
}

void StateValues::write(const ExecCtx& ctx, const float* from) const {
  if (source) return source->write(run, from);
  if (!low) return values.copy_from_host(from);
  const Tensor main = Tensor::empty(ctx, values.shape(), DType::f32);
  main.copy_from_host(from);
  ops::split_main(ctx, main, values, low);
}

std::vector<StatePiece::Box> StatePiece::boxes() const {
  const Shape strides = parameter->shape().contiguous_strides();
  std::vector<Box> list;
  for (const Placed& place : parameter->placement().boxes(begin, end)) {
    std::int64_t first = 0;
    for (int i = 0; i < strides.rank(); ++i) first += place.local[i] * strides[i];
    const std::int64_t count = place.shape.numel();
    TESSERA_ENSURE(InternalError, first >= begin && first + count <= end, "a box of ", name(),
                   " is not contiguous");
    list.push_back({place, values.narrow(first - begin, count)});
  }
  return list;
}

std::vector<Range> ParamStore::counted(const Parameter& parameter) const {
  const Placement& placement = parameter.placement();
  const Range whole{0, parameter.shape().numel()};
  if (!parameter.traits().counted) return {};
  if (placement.is_replicated()) {
    const Communicator* tensor = options_.groups.tensor;
    return tensor == nullptr || tensor->rank() == 0 ? std::vector<Range>{whole} : std::vector<Range>{};
  }
  std::vector<Range> others;  // counted by another tensor rank
  for (const Segment& segment : placement.segments()) {
    if (segment.copy == 0) continue;
    for (const Range& run : runs_of(placement, segment)) others.push_back(run);
  }
  std::sort(others.begin(), others.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> runs;
  std::int64_t done = 0;
  for (const Range& other : others) {
    append(runs, {done, other.begin - done});
    done = other.end();
  }
  append(runs, {done, whole.end() - done});
  return runs;
}

std::vector<ParamStore::PieceRun> ParamStore::piece_runs(PieceSet set, Held ShardPolicy::*of) const {
  if (set == PieceSet::owned) return owned_runs(of);
  std::vector<PieceRun> runs;
  for (const Parameter* p : parameters_) {
    const ParamSlot& slot = layout_.slot_of(*p);
    runs.push_back({&slot, overlap(slot.run(), shards_.updated(slot.bucket))});
  }
  return runs;
}

/// What is held alike is a row, one parameter after the other, of which each rank takes an equal part: every
/// holder computes the same cuts from its own layout. Shares are one row, what is whole on all data ranks
/// another; experts, which others hold, have rows of their own.
std::vector<ParamStore::PieceRun> ParamStore::owned_runs(Held ShardPolicy::*of) const {
  std::vector<PieceRun> runs;
  using Row = std::pair<Held, bool>;
  const auto row_of = [&](const ParamSlot& slot) {
    return Row(shards_.policy(slot.bucket).*of, layout_.buckets()[slot.bucket].experts);
  };
  std::map<Row, std::int64_t> length, done;
  for (const Parameter* p : parameters_) {
    const ParamSlot& slot = layout_.slot_of(*p);
    const Row row = row_of(slot);
    const Range here = row.first == Held::share ? shards_.updated(slot.bucket) : slot.run();
    for (const Range& local : counted(*p)) {
      const Range run = overlap({slot.offset + local.begin, local.count}, here);
      runs.push_back({&slot, run});
      length[row] += run.count;
    }
  }
  for (PieceRun& piece : runs) {
    const Row row = row_of(*piece.slot);
    const std::int64_t at = done[row];
    done[row] += piece.run.count;
    const auto [rank, ranks] = shards_.holders(layout_.buckets()[piece.slot->bucket], row.first);
    const Range own = overlap({at, piece.run.count}, part_of(length[row], rank, ranks));
    piece.run = {piece.run.begin + own.begin - at, own.count};
  }
  return runs;
}

std::vector<StatePiece> ParamStore::pieces_of(const std::vector<PieceRun>& runs, const std::string& kind,
                                              const Values& values) const {
  std::vector<StatePiece> pieces;
  for (const auto& [slot, run] : runs) {
    if (run.count == 0) continue;
    const std::int64_t begin = run.begin - slot->offset;
    pieces.push_back({kind, slot->parameter, begin, begin + run.count, values(slot->bucket, run)});
  }
  return pieces;
}

std::vector<StatePiece> ParamStore::pieces(PieceSet set) const {
  weights_->wait();
  return pieces_of(piece_runs(set, &ShardPolicy::main), "param",
                   [this](std::size_t bucket, const Range& run) { return weights_->values(bucket, run); });
}

std::vector<StatePiece> ParamStore::gradient_pieces(PieceSet set) const {
  return pieces_of(piece_runs(set, &ShardPolicy::state), "grad",
                   [this](std::size_t bucket, const Range& run) { return gradient_->of(bucket, run); });
}

std::vector<StatePiece> ParamStore::pieces(PieceSet set, const std::string& kind,
                                           const StateValues& state) const {
  TESSERA_CHECK(state.numel() == shards_.state_numel(), "state of this ParamStore has ",
                shards_.state_numel(), " elements, not ", state.numel());
  return pieces_of(piece_runs(set, &ShardPolicy::state), kind, [&](std::size_t bucket, const Range& run) {
    return state.narrow(shards_.in_state(bucket, run).begin, run.count);
  });
}

}  // namespace tessera
