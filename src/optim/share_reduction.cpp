/// GradientReduction where a rank holds shares: a bucket has memory from its first contribution in a pass
/// until its sum over the data ranks, which is added to the share. So two buckets, or two units, are there at
/// a time.

#include "optim/reduction.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {

bool GradientReduction::trains(std::size_t bucket) const {
  const Bucket& b = layout_.buckets()[bucket];
  for (std::size_t i = b.first_slot; i < b.first_slot + b.slots; ++i) {
    if (!frozen_[i]) return true;
  }
  return false;
}

void GradientReduction::provide(std::size_t bucket) {
  Tensor& memory = memory_[bucket];
  if (memory) return;
  const Bucket& b = layout_.buckets()[bucket];
  memory = Tensor::empty(ctx_, {b.count}, DType::f32);
  ops::fill_zero(ctx_, memory);
  for (std::size_t i = b.first_slot; i < b.first_slot + b.slots; ++i) {
    const ParamSlot& slot = layout_.slots()[i];
    if (frozen_[i]) continue;
    slot.parameter->bind_grad(
        memory.narrow(0, slot.offset - b.begin, slot.numel).view(slot.parameter->shape()));
  }
}

/// What is written to the bucket's parameters from here on is another contribution.
void GradientReduction::unbind(std::size_t bucket) {
  const Bucket& b = layout_.buckets()[bucket];
  for (std::size_t i = b.first_slot; i < b.first_slot + b.slots; ++i) {
    if (frozen_[i]) continue;
    layout_.slots()[i].parameter->bind_grad({});
    layout_.slots()[i].parameter->clear_grad();
  }
}

void GradientReduction::forget_memory() {
  in_pass_ = false;
  order_.clear();
  leaving_.clear();
  for (std::size_t i = 0; i < memory_.size(); ++i) {
    if (memory_[i]) unbind(i);
  }
  memory_.assign(layout_.buckets().size(), Tensor());
  reduced_.assign(layout_.buckets().size(), false);
}

void GradientReduction::begin_pass(std::vector<std::size_t> buckets) {
  TESSERA_ENSURE(InternalError, !in_pass_, "a backward pass begins before the one before it has ended");
  in_pass_ = true;
  order_.assign(buckets.rbegin(), buckets.rend());
  std::erase_if(order_, [this](std::size_t bucket) { return !trains(bucket); });
  remaining_.assign(layout_.slots().size(), 0);
  incomplete_.assign(layout_.buckets().size(), 0);
  for (const std::size_t bucket : order_) {
    const Bucket& b = layout_.buckets()[bucket];
    for (std::size_t i = b.first_slot; i < b.first_slot + b.slots; ++i) {
      if (frozen_[i]) continue;
      remaining_[i] = 1;
      ++incomplete_[bucket];
    }
  }
}

void GradientReduction::complete(const std::vector<std::size_t>& buckets) {
  for (const std::size_t bucket : buckets) incomplete_[bucket] = 0;
  start_next();
}

void GradientReduction::start_next() {
  while (!order_.empty() && incomplete_[order_.back()] == 0) {
    start_share(order_.back());
    order_.pop_back();
  }
}

void GradientReduction::end_pass() {
  for (; !order_.empty(); order_.pop_back()) start_share(order_.back());
  in_pass_ = false;
}

void GradientReduction::start_share(std::size_t bucket) {
  provide(bucket);
  // A unit is two buckets and more: what kernels read in fp32, and experts, have their own.
  settle_shares(shards_.shares_model() ? 1 : 0);
  unbind(bucket);
  const Bucket& b = layout_.buckets()[bucket];
  const Range& own = shards_.updated(bucket);
  const Tensor memory = std::exchange(memory_[bucket], Tensor());
  leaving_.push_back(
      {bucket, start_sum(*shards_.ranks(bucket).data, memory, {own.begin - b.begin, own.count})});
  leaving_.back().sum.target = {};  // the sum is added to the share
}

/// Adds sums to the shares until at most `left` are still on their way.
void GradientReduction::settle_shares(std::size_t left) {
  while (leaving_.size() > left) {
    const Leaving& leaving = leaving_.front();
    leaving.sum.pending.wait(ctx_);
    const Range place = shards_.in_state(leaving.bucket, shards_.updated(leaving.bucket));
    const bool adds = reduced_[leaving.bucket];
    grad_.change(place, adds, [&](const Tensor& values, const Range& where) {
      ops::axpby(ctx_, 1.0f, leaving.sum.result.narrow(0, where.begin - place.begin, where.count),
                 adds ? 1.0f : 0.0f, values);
    });
    reduced_[leaving.bucket] = true;
    leaving_.pop_front();
  }
}

std::size_t GradientReduction::passing_bytes() const {
  std::size_t bytes = 0;
  for (const Tensor& memory : memory_) bytes += memory ? memory.nbytes() : 0;
  for (const Leaving& leaving : leaving_) bytes += leaving.sum.held.nbytes();
  return bytes;
}

void GradientReduction::finish_shares() {
  end_pass();
  settle_shares(0);
  for (std::size_t i = 0; i < layout_.buckets().size(); ++i) {
    if (trains(i) && !reduced_[i]) start_share(i);
  }
  settle_shares(0);
  forget_memory();
}

}  // namespace tessera
