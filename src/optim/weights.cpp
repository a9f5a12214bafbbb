#include "tessera/optim/weights.hpp"

#include <algorithm>

#include "tessera/ops/elementwise.hpp"

namespace tessera {

namespace {

/// Gives the first rows their own standard deviation, drawn as all of them are.
void scale_first_rows(const ExecCtx& ctx, const Parameter& p, const Tensor& weight) {
  const Init& init = p.init();
  if (init.first_rows == 0) return;
  const auto scale = [&](std::int64_t local, std::int64_t global, std::int64_t count) {
    count = std::min(count, init.first_rows - global);
    if (count <= 0) return;
    const Tensor rows = weight.narrow(0, local, count);
    ops::axpby(ctx, 0.0f, rows, init.first_std / init.std, rows);
  };
  if (p.placement().is_replicated()) return scale(0, 0, weight.size(0));
  TESSERA_CHECK(p.placement().dim() == 0, "parameter ", p.name(),
                ": rows with a deviation of their own are split by ", "rows");
  for (const Segment& s : p.placement().segments()) scale(s.local, s.global, s.count);
}

}  // namespace

Weights::Weights(const ExecCtx& ctx, const FlatLayout& layout, const Shards& shards, const Options& options)
    : ctx_(ctx), layout_(layout), shards_(shards), options_(options) {
  std::int64_t mains = 0, lows = 0, models = 0;
  for (std::size_t i = 0; i < layout_.buckets().size(); ++i) {
    const Bucket& bucket = layout_.buckets()[i];
    const Range& own = shards_.updated(i);
    std::int64_t& held = splits(bucket) ? lows : mains;
    main_at_.push_back(held + (main_is_whole(i) ? own.begin - bucket.begin : 0));
    held += main_is_whole(i) ? bucket.count : own.count;
    model_at_.push_back(models);
    models += !has_copy(i) ? 0 : model_is_whole(i) ? bucket.count : own.count;
  }
  gathers_.resize(main_at_.size());
  whole_.resize(main_at_.size());
  const auto zeroed = [&](std::int64_t n, DType dtype) {
    Tensor buffer = Tensor::empty(ctx_, {n}, dtype);
    ops::fill_zero(ctx_, buffer);
    return buffer;
  };
  main_ = zeroed(mains, DType::f32);
  if (options_.split_main) low_ = zeroed(lows, DType::u16);
  if (options_.compute != DType::f32) model_ = zeroed(models, options_.compute);
}

Weights::~Weights() {
  if (!shards_.sharded()) return;
  for (const ParamSlot& slot : layout_.slots()) slot.parameter->set_gate(nullptr);
}

bool Weights::has_copy(std::size_t bucket) const {
  if (options_.compute == DType::f32) return false;
  return model_is_whole(bucket) || !layout_.buckets()[bucket].reads_main;
}

Tensor Weights::model_of(std::size_t bucket, const Range& run) const {
  const std::int64_t first =
      model_is_whole(bucket) ? layout_.buckets()[bucket].begin : shards_.updated(bucket).begin;
  return model_.narrow(0, model_at_[bucket] + run.begin - first, run.count);
}

/// Whether all of a bucket's main weights are here in fp32.
bool Weights::in_place(std::size_t bucket) const {
  return main_is_whole(bucket) && !splits(layout_.buckets()[bucket]);
}

void Weights::draw(const ParamSlot& slot, const Tensor& weight) const {
  const Parameter& p = *slot.parameter;
  const Placement& placement = p.placement();
  if (p.init().kind == Init::Kind::zeros) return;  // the buffers are
  if (p.init().kind == Init::Kind::ones) return ops::fill_constant(ctx_, weight, 1.0f);
  // A matrix whose columns are the split dimension and all after it; whole parameters are one row.
  const RngKey key{.seed = ctx_.seed, .site = site_of(p.name()), .step = 0};
  if (placement.is_replicated()) {
    ops::fill_normal(ctx_, weight.view({1, -1}), p.init().std, key, {});
    return scale_first_rows(ctx_, p, weight);
  }
  std::int64_t rows = 1, inner = 1;
  for (int i = 0; i < placement.dim(); ++i) rows *= p.shape()[i];
  for (int i = placement.dim() + 1; i < p.shape().rank(); ++i) inner *= p.shape()[i];
  const Tensor matrix = weight.view({rows, -1});
  for (const Segment& s : placement.segments()) {
    if (s.count == 0) continue;
    const Tensor part = matrix.narrow(1, s.local * inner, s.count * inner);
    const ops::Region region{0, s.global * inner, placement.global()[placement.dim()] * inner};
    const Tensor target = part.is_contiguous() ? part : Tensor::empty(ctx_, part.shape(), DType::f32);
    ops::fill_normal(ctx_, target, p.init().std, key, region);
    if (!part.is_contiguous()) ops::copy(ctx_, target, part);
  }
  scale_first_rows(ctx_, p, weight);
}

/// `scratch`: zeros [slot.numel].
void Weights::draw_in(const ParamSlot& slot, const Tensor& scratch) {
  draw(slot, scratch.view(slot.parameter->shape()));
  const Range own = overlap(slot.run(), shards_.updated(slot.bucket));
  const Tensor part = scratch.narrow(0, own.count > 0 ? own.begin - slot.offset : 0, own.count);
  const bool whole = has_copy(slot.bucket) && model_is_whole(slot.bucket);
  if (!splits(layout_.buckets()[slot.bucket])) {
    if (whole) ops::axpby(ctx_, 1.0f, scratch, 0.0f, model_of(slot.bucket, slot.run()));
    if (own.count > 0) ops::copy(ctx_, part, main_of(slot.bucket, own));
    return;
  }
  // The others' shares are rounded like our own.
  if (whole) {
    ops::split_main(ctx_, scratch, model_of(slot.bucket, slot.run()),
                    Tensor::empty(ctx_, {slot.numel}, DType::u16));
  }
  if (own.count > 0) {
    const StateValues target = values(slot.bucket, own);
    ops::split_main(ctx_, part, target.values, target.low);
  }
}

void Weights::initialise(const Tensor& scratch) {
  bool borrowed = false;
  for (const ParamSlot& slot : layout_.slots()) {
    if (in_place(slot.bucket)) {
      draw(slot, main_of(slot.bucket, slot.run()).view(slot.parameter->shape()));
    } else if (scratch) {
      draw_in(slot, scratch.narrow(0, slot.offset, slot.numel));
      borrowed = true;
    } else {
      const Tensor own = Tensor::empty(ctx_, {slot.numel}, DType::f32);
      ops::fill_zero(ctx_, own);
      draw_in(slot, own);
    }
  }
  if (borrowed) ops::fill_zero(ctx_, scratch);
  refresh_copy();
}

Weights::Views Weights::views(const ParamSlot& slot) const {
  const Shape& shape = slot.parameter->shape();
  const auto part_of = [&](const Tensor& bucket) {
    const Bucket& b = layout_.buckets()[slot.bucket];
    return bucket ? bucket.narrow(0, slot.offset - b.begin, slot.numel).view(shape) : Tensor();
  };
  const Whole& gathered = whole_[slot.bucket];
  Tensor main = in_place(slot.bucket) ? main_of(slot.bucket, slot.run()).view(shape) : part_of(gathered.main);
  if (options_.compute == DType::f32) return {main, main};
  if (!model_is_whole(slot.bucket)) return {part_of(gathered.model), main};
  return {model_of(slot.bucket, slot.run()).view(shape), main};
}

Tensor Weights::main_of(std::size_t bucket, const Range& run) const {
  return main_.narrow(0, main_at_[bucket] + run.begin - shards_.updated(bucket).begin, run.count);
}

StateValues Weights::values(std::size_t bucket, const Range& run) const {
  if (!splits(layout_.buckets()[bucket])) return {main_of(bucket, run)};
  return {model_of(bucket, run),
          low_.narrow(0, main_at_[bucket] + run.begin - shards_.updated(bucket).begin, run.count)};
}

ops::MainWeights Weights::target(std::size_t bucket, const Range& run) const {
  if (splits(layout_.buckets()[bucket])) {
    const StateValues halves = values(bucket, run);
    return {Tensor(), halves.values, halves.low};
  }
  // Where the fp32 weights are gathered the copy is made from all of them, later.
  const bool rounds = has_copy(bucket) && !(shards_.sharded() && main_is_whole(bucket));
  return {main_of(bucket, run), rounds ? model_of(bucket, run) : Tensor()};
}

Tensor Weights::main_buffer() const {
  wait();
  return main_.numel() == layout_.numel() ? main_ : Tensor();
}

const Tensor& Weights::model_buffer() const {
  wait();
  return model_;
}

Tensor Weights::main(const Parameter& parameter) const {
  const ParamSlot& slot = layout_.slot_of(parameter);
  TESSERA_CHECK(in_place(slot.bucket), "this rank holds ",
                splits(layout_.buckets()[slot.bucket]) ? "the two halves" : "a share",
                " of the main weights of ", parameter.name(),
                ": whole() gathers them, pieces gives what is here");
  wait();
  return main_of(slot.bucket, slot.run()).view(parameter.shape());
}

Tensor Weights::whole(const Parameter& parameter) const {
  const ParamSlot& slot = layout_.slot_of(parameter);
  wait();
  if (main_is_whole(slot.bucket)) return values(slot.bucket, slot.run()).read(ctx_).view(parameter.shape());
  const Range own = overlap(slot.run(), shards_.updated(slot.bucket));
  return shards_.gathered(ctx_, slot, values(slot.bucket, own).read(ctx_));
}

void Weights::refresh_copy() {
  if (!model_) return;
  wait();
  for (std::size_t i = 0; i < main_at_.size(); ++i) {
    const Bucket& bucket = layout_.buckets()[i];
    if (splits(bucket) || !has_copy(i)) continue;
    const Range held = main_is_whole(i) ? bucket.run() : shards_.updated(i);
    ops::axpby(ctx_, 1.0f, main_of(i, held), 0.0f, model_of(i, held));
  }
}

void Weights::gather() {
  refresh_copy();
  for (std::size_t i = main_at_.size(); i-- > 0;) spread(i);
  wait();
}

void Weights::spread(std::size_t bucket) {
  if (!shards_.sharded()) return;
  if (!model_is_whole(bucket)) {
    TESSERA_ENSURE(InternalError, !fetched(bucket), "weights change while they are gathered");
    return;
  }
  wait(bucket);
  const Bucket& b = layout_.buckets()[bucket];
  const Range& share = shards_.updated(bucket);
  const Tensor whole = main_is_whole(bucket) ? main_of(bucket, b.run()) : model_of(bucket, b.run());
  const Tensor own = whole.narrow(0, share.begin - b.begin, share.count);
  gathers_[bucket] = {shards_.data()->all_gather(ctx_, own, whole), true};
  ++gathers_running_;
  for (const ParamSlot& slot : layout_.slots_of(b))
    slot.parameter->set_gate([this, bucket] { wait(bucket); });
}

void Weights::wait(std::size_t bucket) const {
  Gather& gather = gathers_[bucket];
  if (!gather.running) return;
  gather.pending.wait(ctx_);
  gather = {};
  --gathers_running_;
  const Bucket& b = layout_.buckets()[bucket];
  if (model_ && main_is_whole(bucket))
    ops::axpby(ctx_, 1.0f, main_of(bucket, b.run()), 0.0f, model_of(bucket, b.run()));
}

void Weights::fetch(std::size_t bucket) {
  Whole& whole = whole_[bucket];
  if (std::exchange(whole.here, true)) return;
  const bool copied = has_copy(bucket);
  const Range& share = shards_.updated(bucket);
  Tensor& into = copied ? whole.model : whole.main;
  into = Tensor::empty(ctx_, {layout_.buckets()[bucket].count}, copied ? options_.compute : DType::f32);
  whole.pending =
      shards_.gathering()->all_gather(ctx_, copied ? model_of(bucket, share) : main_of(bucket, share), into);
}

void Weights::arrive(std::size_t bucket) {
  Whole& whole = whole_[bucket];
  TESSERA_ENSURE(InternalError, whole.here, "bucket ", bucket, " arrives and was not fetched");
  whole.pending.wait(ctx_);
  if (options_.compute != DType::f32 && !whole.model) {
    whole.model = Tensor::empty(ctx_, whole.main.shape(), options_.compute);
    ops::axpby(ctx_, 1.0f, whole.main, 0.0f, whole.model);
  }
  for (const ParamSlot& slot : layout_.slots_of(layout_.buckets()[bucket])) {
    const auto [value, main] = views(slot);
    slot.parameter->bind_weight(value, main);
    slot.parameter->set_gate(nullptr);
  }
}

void Weights::release(std::size_t bucket, const std::function<void()>& gate) {
  if (whole_[bucket].here) whole_[bucket].pending.wait(ctx_);
  whole_[bucket] = {};
  for (const ParamSlot& slot : layout_.slots_of(layout_.buckets()[bucket])) {
    slot.parameter->bind_weight({}, {});
    slot.parameter->set_gate(gate);
  }
}

void Weights::wait() const {
  for (std::size_t i = gathers_.size(); gathers_running_ > 0 && i-- > 0;) wait(i);
}

std::size_t Weights::gathered_bytes() const {
  std::size_t bytes = 0;
  for (const Whole& whole : whole_) {
    for (const Tensor* buffer : {&whole.main, &whole.model}) bytes += *buffer ? buffer->nbytes() : 0;
  }
  return bytes;
}

std::size_t Weights::persistent_bytes() const {
  std::size_t bytes = 0;
  for (const Tensor* buffer : {&main_, &low_, &model_}) {
    if (*buffer) bytes += buffer->nbytes();
  }
  return bytes;
}

}  // namespace tessera
