#include "tessera/optim/gradient.hpp"

#include "optim/reduction.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {

GradientAccumulator::GradientAccumulator(const ExecCtx& ctx, const FlatLayout& layout, const Shards& shards,
                                         const StoreGroups& groups, bool trainable, std::vector<bool> frozen,
                                         std::shared_ptr<OffloadPlace> place)
    : ctx_(ctx),
      layout_(layout),
      shards_(shards),
      groups_(groups),
      frozen_(std::move(frozen)),
      trained_(frozen_.size(), false),
      place_of_memory_(std::move(place)) {
  clear_contributions();
  if (!trainable) return;
  TESSERA_CHECK(
      shards_.shares_gradient() || !place_of_memory_ || place_of_memory_->config.gradients == OffloadTo::none,
      "offload.gradients needs zero_stage 2 or 3, which add a pass's gradients to a share");
  buckets_ = GradientMemory(ctx_, place_of_memory_,
                            shards_.shares_gradient() ? shards_.state_numel() : layout_.numel());
  if (!buckets_.away()) buckets_.zero();
  make_reduction();
}

GradientAccumulator::~GradientAccumulator() {
  if (!buckets_ || !shards_.shares_gradient()) return;
  for (const ParamSlot& slot : layout_.slots()) slot.parameter->bind_grad_maker(nullptr);
}

void GradientAccumulator::check_trainable() const {
  TESSERA_CHECK(buckets_, "this ParamStore holds no gradients: it was made with trainable = false");
}

void GradientAccumulator::make_reduction() {
  reduction_ = std::make_unique<GradientReduction>(ctx_, layout_, groups_, shards_, buckets_, frozen_);
}

const GradientMemory& GradientAccumulator::sum_memory() {
  if (!sum_) sum_ = GradientMemory(ctx_, place_of_memory_, shards_.state_numel());
  return sum_;
}

/// The latest call's gradient, times `factor`, into memory laid out as ParamStore::zeros().
void GradientAccumulator::copy_latest(const GradientMemory& to, double factor, bool adds) {
  for (std::size_t i = 0; i < layout_.buckets().size(); ++i) {
    const Range& own = shards_.updated(i);
    const Range place = shards_.in_state(i, own);
    to.change(place, adds, [&](const Tensor& values, const Range& where) {
      const Range run = latest(i, {own.begin + where.begin - place.begin, where.count});
      ops::axpby(ctx_, static_cast<float>(factor), buckets_.read(run), adds ? 1.0f : 0.0f, values);
    });
  }
}

void GradientAccumulator::add_to_sum(double factor, float beta) {
  copy_latest(sum_memory(), factor, beta != 0);
}

/// The buckets are the next call's.
void GradientAccumulator::move_to_sum() {
  if (place_ != Place::buckets) return;
  add_to_sum(factor_, 0.0f);
  place_ = Place::sum;
  ++version_;
}

void GradientAccumulator::clear_contributions() {
  for (const ParamSlot& slot : layout_.slots()) slot.parameter->clear_grad();
}

void GradientAccumulator::begin_call(const std::function<int(const Parameter&)>& contributions) {
  check_trainable();
  TESSERA_CHECK(!call_is_closed(),
                "begin_call before the last call's gradient was added, set aside or dropped");
  if (call_ == Call::open) reduction_->abandon();
  move_to_sum();
  clear_contributions();
  reduction_->open(contributions);
  call_ = Call::open;
}

void GradientAccumulator::ready(Parameter& parameter) {
  check_trainable();
  reduction_->ready(parameter);
}

GradientPasses GradientAccumulator::passes() {
  return GradientPasses(shards_.shares_gradient() ? reduction_.get() : nullptr);
}

void GradientPasses::begin(std::vector<std::size_t> buckets) {
  if (reduction_ != nullptr) reduction_->begin_pass(std::move(buckets));
}

void GradientPasses::complete(const std::vector<std::size_t>& buckets) {
  if (reduction_ != nullptr) reduction_->complete(buckets);
}

void GradientPasses::end() {
  if (reduction_ != nullptr) reduction_->end_pass();
}

void GradientPasses::settle() {
  if (reduction_ != nullptr) reduction_->settle();
}

std::size_t GradientPasses::held_bytes() const {
  return reduction_ != nullptr ? reduction_->passing_bytes() : 0;
}

void GradientAccumulator::close_call(bool repeated) {
  check_trainable();
  TESSERA_CHECK(call_ == Call::open, "finish_call without begin_call after ", finished_calls_,
                " finished calls: the gradients of this call were added to those of the one before");
  if (repeated) {
    reduction_->open(nullptr);  // nothing is counted down any more
    for (const ParamSlot& slot : layout_.slots()) {
      if (slot.parameter->trained()) slot.parameter->next_beta();  // what the graph wrote is there
    }
  } else {
    reduction_->finish();
  }
  call_ = Call::closed;
}

void GradientAccumulator::finish_call(double factor) {
  close_call();
  add_call(factor);
}

void GradientAccumulator::add_call(double factor) {
  TESSERA_CHECK(call_is_closed(), "add_call needs a close_call before it");
  call_ = Call::none;
  if (place_ == Place::sum) {
    add_to_sum(factor, 1.0f);
  } else {
    factor_ = factor;
  }
  note_finished(place_ == Place::sum ? Place::sum : Place::buckets);
}

void GradientAccumulator::drop_call() {
  TESSERA_CHECK(call_is_closed(), "drop_call needs a close_call before it");
  call_ = Call::none;
}

GradientMemory GradientAccumulator::set_call_aside() {
  TESSERA_CHECK(call_is_closed(), "set_call_aside needs a close_call before it");
  GradientMemory aside(ctx_, place_of_memory_, shards_.state_numel());
  copy_latest(aside, 1.0, false);
  drop_call();
  return aside;
}

void GradientAccumulator::add_set_aside(const GradientMemory& gradient, double factor) {
  TESSERA_CHECK(gradient && gradient.numel() == shards_.state_numel(), "a gradient set aside has ",
                shards_.state_numel(), " elements");
  move_to_sum();
  const bool adds = place_ != Place::nowhere;
  sum_memory().change({0, gradient.numel()}, adds, [&](const Tensor& values, const Range& where) {
    ops::axpby(ctx_, static_cast<float>(factor), gradient.read(where), adds ? 1.0f : 0.0f, values);
  });
  note_finished(Place::sum);
}

/// Another call was finished: what is trained now was trained in it.
void GradientAccumulator::note_finished(Place place) {
  for (std::size_t i = 0; i < frozen_.size(); ++i) {
    if (!frozen_[i]) trained_[i] = true;
  }
  place_ = place;
  ++finished_calls_;
  ++version_;
}

FlatGradient GradientAccumulator::sum() const {
  const double factor = scale();
  TESSERA_CHECK(!shards_.sharded(), "this rank holds a share of the gradient: whole() gathers it");
  return {pending().flat->on_device(), factor};
}

double GradientAccumulator::scale() const {
  TESSERA_CHECK(finished_calls_ > 0, "no gradients: no call was finished since the last update");
  return place_ == Place::sum ? 1.0 : factor_;
}

GradientAccumulator::Pending GradientAccumulator::pending() const {
  scale();  // refuses where there is none
  const bool summed = place_ == Place::sum;
  return {summed ? &sum_ : &buckets_, summed || shards_.shares_gradient()};
}

Range GradientAccumulator::latest(std::size_t bucket, const Range& run) const {
  return shards_.shares_gradient() ? shards_.in_state(bucket, run) : run;
}

void GradientAccumulator::bind(std::size_t slot) {
  const ParamSlot& s = layout_.slots()[slot];
  if (!buckets_ || frozen_[slot]) return;
  if (shards_.shares_gradient()) {
    s.parameter->bind_grad_maker([this, bucket = s.bucket] { reduction_->provide(bucket); });
  } else {
    s.parameter->bind_grad(buckets_.on_device().narrow(0, s.offset, s.numel).view(s.parameter->shape()));
  }
}

StateValues GradientAccumulator::of(std::size_t bucket, const Range& run) const {
  if (place_ != Place::sum) return buckets_.values(latest(bucket, run));
  return sum_.values(shards_.in_state(bucket, run));
}

Tensor GradientAccumulator::whole(const Parameter& parameter) const {
  const ParamSlot& slot = layout_.slot_of(parameter);
  const auto factor = static_cast<float>(scale());
  const Range run = overlap(slot.run(), shards_.updated(slot.bucket));
  const Tensor held = place_ == Place::sum ? sum_.read(shards_.in_state(slot.bucket, run))
                                           : buckets_.read(latest(slot.bucket, run));
  const Tensor own = Tensor::empty(ctx_, held.shape(), DType::f32);
  if (own.numel() > 0) ops::axpby(ctx_, factor, held, 0.0f, own);
  return shards_.sharded() ? shards_.gathered(ctx_, slot, own) : own.view(parameter.shape());
}

void GradientAccumulator::forget_finished() {
  trained_.assign(frozen_.size(), false);
  finished_calls_ = 0;
  place_ = Place::nowhere;
  ++version_;
}

void GradientAccumulator::forget() {
  if (!call_is_closed()) return discard();
  forget_finished();
}

void GradientAccumulator::discard() {
  if (call_ == Call::open && reduction_) reduction_->abandon();
  clear_contributions();
  if (reduction_) reduction_->open(nullptr);
  forget_finished();
  call_ = Call::open;
}

void GradientAccumulator::restore(int calls, const std::function<bool(const Parameter&)>& trained) {
  TESSERA_CHECK(calls > 0, "a gradient of ", calls, " calls");
  discard();
  sum_memory().zero();
  for (std::size_t i = 0; i < frozen_.size(); ++i) trained_[i] = trained(*layout_.slots()[i].parameter);
  place_ = Place::sum;
  call_ = Call::none;
  finished_calls_ = calls;
}

void GradientAccumulator::set_frozen(std::vector<bool> frozen) {
  check_trainable();
  TESSERA_CHECK(!call_is_closed(),
                "set_frozen before the last call's gradient was added, set aside or dropped");
  if (frozen == frozen_) return;
  if (call_ == Call::open) reduction_->abandon();
  move_to_sum();  // what is frozen in the next call must be zero in the buckets
  for (std::size_t i = 0; i < frozen.size(); ++i) {
    const ParamSlot& slot = layout_.slots()[i];
    if (!frozen[i] || frozen_[i]) continue;
    const Range held =
        shards_.shares_gradient() ? overlap(slot.run(), shards_.updated(slot.bucket)) : slot.run();
    if (held.count == 0) continue;
    buckets_.change(shards_.shares_gradient() ? latest(slot.bucket, held) : held, false,
                    [this](const Tensor& values, const Range&) { ops::fill_zero(ctx_, values); });
  }
  frozen_ = std::move(frozen);
  clear_contributions();
  make_reduction();
}

std::size_t GradientAccumulator::persistent_bytes() const {
  return buckets_.resident_bytes() + sum_.resident_bytes();
}

}  // namespace tessera
