// What a rank counts, updates and saves of each parameter.

#include <algorithm>

#include "optim/runs.hpp"
#include "tessera/optim/param_store.hpp"

namespace tessera {

StateValues StateValues::narrow(std::int64_t begin, std::int64_t count) const {
  return {values.narrow(0, begin, count), low ? low.narrow(0, begin, count) : Tensor()};
}

Tensor StateValues::read(const ExecCtx& ctx) const {
  if (!low) return values;
  Tensor main = Tensor::empty(ctx, values.shape(), DType::f32);
  ops::join_main(ctx, values, low, main);
  return main;
}

void StateValues::write(const ExecCtx& ctx, const float* source) const {
  if (!low) return values.copy_from_host(source);
  const Tensor main = Tensor::empty(ctx, values.shape(), DType::f32);
  main.copy_from_host(source);
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

/// A run of the flat buffers inside one parameter and inside updated(bucket).
struct ParamStore::Cut {
  const ParamSlot* slot = nullptr;
  FlatRun run;
};

FlatRun ParamStore::share(std::size_t bucket) const {
  return layout_.buckets()[bucket].share(data_rank_, data_ranks_);
}

ParamStore::Slice ParamStore::slice(std::size_t bucket, const FlatRun& run) const {
  const Bucket& b = layout_.buckets()[bucket];
  const Tensor gradient = gradient_of(bucket, run);
  if (splits_main(b)) {
    const auto [model, low] = main_values(bucket, run);
    return {gradient, {Tensor(), model, low}, in_state(bucket, run)};
  }
  // Where the fp32 weights are gathered the copy is made from all of them, later.
  const bool rounds = model_ && !(sharded_ && main_is_whole(b));
  return {gradient,
          {main_of(bucket, run), rounds ? model_.narrow(0, run.begin, run.count) : Tensor()},
          in_state(bucket, run)};
}

std::vector<FlatRun> ParamStore::counted(const Parameter& parameter) const {
  const Placement& placement = parameter.placement();
  const FlatRun whole{0, parameter.shape().numel()};
  if (!parameter.traits().counted) return {};
  if (placement.is_replicated()) {
    const Communicator* tensor = options_.groups.tensor;
    return tensor == nullptr || tensor->rank() == 0 ? std::vector<FlatRun>{whole} : std::vector<FlatRun>{};
  }
  std::vector<FlatRun> others;  // counted by another tensor rank
  for (const Segment& segment : placement.segments()) {
    if (segment.copy == 0) continue;
    for (const FlatRun& run : runs_of(placement, segment)) others.push_back(run);
  }
  std::sort(others.begin(), others.end(),
            [](const FlatRun& a, const FlatRun& b) { return a.begin < b.begin; });
  std::vector<FlatRun> runs;
  std::int64_t done = 0;
  for (const FlatRun& other : others) {
    append(runs, {done, other.begin - done});
    done = other.end();
  }
  append(runs, {done, whole.end() - done});
  return runs;
}

std::vector<ParamStore::Cut> ParamStore::cuts(PieceSet set) const {
  std::vector<Cut> cuts;
  for (const Parameter* p : parameters_) {
    const ParamSlot& slot = slots()[layout_.index_of(*p)];
    if (set == PieceSet::held) {
      const FlatRun run = overlap(slot.run(), updated(slot.bucket));
      if (run.count > 0) cuts.push_back({&slot, run});
      continue;
    }
    for (const FlatRun& local : counted(*p)) {
      const FlatRun run = overlap({slot.offset + local.begin, local.count}, share(slot.bucket));
      if (run.count > 0) cuts.push_back({&slot, run});
    }
  }
  return cuts;
}

std::vector<StatePiece> ParamStore::pieces(PieceSet set) const {
  wait_for_weights();
  std::vector<StatePiece> pieces;
  for (const auto& [slot, run] : cuts(set)) {
    const std::int64_t begin = run.begin - slot->offset;
    pieces.push_back({"param", slot->parameter, begin, begin + run.count, main_values(slot->bucket, run)});
  }
  return pieces;
}

std::vector<StatePiece> ParamStore::gradient_pieces(PieceSet set) const {
  std::vector<StatePiece> pieces;
  for (const auto& [slot, run] : cuts(set)) {
    const std::int64_t begin = run.begin - slot->offset;
    pieces.push_back({"grad", slot->parameter, begin, begin + run.count, {gradient_of(slot->bucket, run)}});
  }
  return pieces;
}

std::vector<StatePiece> ParamStore::pieces(PieceSet set, const std::string& kind, const Tensor& state) const {
  TESSERA_CHECK(state && state.numel() == state_numel_, "state of this ParamStore has ", state_numel_,
                " elements, not shape ", state.shape());
  std::vector<StatePiece> pieces;
  for (const auto& [slot, run] : cuts(set)) {
    const std::int64_t begin = run.begin - slot->offset;
    pieces.push_back({kind,
                      slot->parameter,
                      begin,
                      begin + run.count,
                      {state.narrow(0, in_state(slot->bucket, run).begin, run.count)}});
  }
  return pieces;
}

}  // namespace tessera
