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
  make_away();
  std::int64_t mains = 0, lows = 0, models = 0;
  for (std::size_t i = 0; i < layout_.buckets().size(); ++i) {
    const Bucket& bucket = layout_.buckets()[i];
    const Range& own = shards_.updated(i);
    std::int64_t& held = splits(bucket) ? lows : mains;
    main_at_.push_back(held + (main_is_whole(i) ? own.begin - bucket.begin : 0));
    held += main_is_away(i) ? 0 : main_is_whole(i) ? bucket.count : own.count;
    model_at_.push_back(models);
    models += !has_copy(i) || model_is_away(i) ? 0 : model_is_whole(i) ? bucket.count : own.count;
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

void Weights::make_away() {
  const auto& place = options_.place;
  if (!place) return;
  const OffloadConfig& config = place->config;
  const bool copies = options_.compute != DType::f32;
  const auto made = [&](OffloadTo to, const char* what, DType dtype) {
    return std::make_shared<OffloadedBuffer>(place, to, what, dtype, shards_.state_numel());
  };
  TESSERA_CHECK(config.parameters == OffloadTo::none || shards_.shares_model(),
                "offload.parameters needs zero_stage 3, which brings weights together for each use");
  TESSERA_CHECK(config.parameters == OffloadTo::none || !options_.split_main,
                "offload.parameters with split main weights: give one of the two");
  const bool main_goes = copies ? config.optimizer != OffloadTo::none && !options_.split_main
                                : config.parameters != OffloadTo::none;
  if (main_goes) main_away_ = made(copies ? config.optimizer : config.parameters, "main weights", DType::f32);
  if (copies && config.parameters != OffloadTo::none)
    model_away_ = made(config.parameters, "weights", options_.compute);
}

bool Weights::main_is_away(std::size_t bucket) const {
  return main_away_ && (options_.compute == DType::f32 || !layout_.buckets()[bucket].reads_main);
}

bool Weights::model_is_away(std::size_t bucket) const { return model_away_ && has_copy(bucket); }

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
  return main_is_whole(bucket) && !splits(layout_.buckets()[bucket]) && !main_is_away(bucket);
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
    if (own.count > 0 && main_is_away(slot.bucket)) {
      main_away_->store(shards_.in_state(slot.bucket, own), part);
    } else if (own.count > 0) {
      ops::copy(ctx_, part, main_of(slot.bucket, own));
    }
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

Tensor Weights::read_main(std::size_t bucket, const Range& run) const {
  if (main_is_away(bucket)) return main_away_->load(shards_.in_state(bucket, run));
  return values(bucket, run).read(ctx_);
}

StateValues Weights::values(std::size_t bucket, const Range& run) const {
  if (main_is_away(bucket)) return main_away_->values(main_away_, shards_.in_state(bucket, run));
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
  const bool rounds =
      has_copy(bucket) && !model_is_away(bucket) && !(shards_.sharded() && main_is_whole(bucket));
  return {main_is_away(bucket) ? Tensor() : main_of(bucket, run), rounds ? model_of(bucket, run) : Tensor()};
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
  TESSERA_CHECK(!main_is_away(slot.bucket), "the main weights of ", parameter.name(),
                " are offloaded: whole() brings them, pieces gives what is here");
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
  if (main_is_whole(slot.bucket)) return read_main(slot.bucket, slot.run()).view(parameter.shape());
  const Range own = overlap(slot.run(), shards_.updated(slot.bucket));
  return shards_.gathered(ctx_, slot, read_main(slot.bucket, own));
}

/// Of what is here of a bucket's main weights.
void Weights::round(std::size_t bucket, const Range& run) {
  const Tensor main = main_is_away(bucket) ? read_main(bucket, run) : main_of(bucket, run);
  const Tensor model =
      model_is_away(bucket) ? Tensor::empty(ctx_, {run.count}, options_.compute) : model_of(bucket, run);
  ops::axpby(ctx_, 1.0f, main, 0.0f, model);
  if (model_is_away(bucket)) model_away_->store(shards_.in_state(bucket, run), model);
}

void Weights::refresh_copy() {
  if (options_.compute == DType::f32) return;
  wait();
  for (std::size_t i = 0; i < main_at_.size(); ++i) {
    const Bucket& bucket = layout_.buckets()[i];
    if (splits(bucket) || !has_copy(i)) continue;
    const Range held = main_is_whole(i) ? bucket.run() : shards_.updated(i);
    // What is elsewhere comes through the device in tiles.
    const std::int64_t most = main_is_away(i) || model_is_away(i) ? options_.place->config.tile : held.count;
    for (std::int64_t done = 0; done < held.count; done += most)
      round(i, {held.begin + done, std::min(most, held.count - done)});
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
  gathers_[bucket] = {shards_.ranks(bucket).data->all_gather(ctx_, own, whole), true};
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
  const Bucket& b = layout_.buckets()[bucket];
  into = Tensor::empty(ctx_, {b.count}, copied ? options_.compute : DType::f32);
  if (copied ? model_is_away(bucket) : main_is_away(bucket)) {
    // The gather follows the copy; neither waits for what is computed after this, nor holds it up.
    const Tensor own = into.narrow(0, share.begin - b.begin, share.count);
    whole.copied = (copied ? model_away_ : main_away_)->fetch(shards_.in_state(bucket, share), own);
    whole.pending = shards_.ranks(bucket).gathering->all_gather(options_.place->link.incoming(), own, into);
    return;
  }
  whole.pending = shards_.ranks(bucket).gathering->all_gather(
      ctx_, copied ? model_of(bucket, share) : main_of(bucket, share), into);
}

void Weights::arrive(std::size_t bucket) {
  Whole& whole = whole_[bucket];
  TESSERA_ENSURE(InternalError, whole.here, "bucket ", bucket, " arrives and was not fetched");
  whole.wait(ctx_);
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
  if (whole_[bucket].here) whole_[bucket].wait(ctx_);
  whole_[bucket] = {};
  for (const ParamSlot& slot : layout_.slots_of(layout_.buckets()[bucket])) {
    slot.parameter->bind_weight({}, {});
    slot.parameter->set_gate(gate);
  }
}

void Weights::wait() const {
  for (std::size_t i = gathers_.size(); gathers_running_ > 0 && i-- > 0;) wait(i);
}

bool Weights::coming() const {
  return std::ranges::any_of(gathers_,
                             [](const Gather& gather) { return gather.running && !gather.pending.done(); });
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
  for (const auto& away : {main_away_, model_away_}) bytes += away ? away->resident_bytes() : 0;
  return bytes;
}

}  // namespace tessera
