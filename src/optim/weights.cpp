// New weights from the rank that updated them to those that read them.

#include "tessera/ops/elementwise.hpp"
#include "tessera/optim/param_store.hpp"

namespace tessera {

void ParamStore::refresh_model_copy() {
  if (!model_) return;
  wait_for_weights();
  for (std::size_t i = 0; i < owned_.size(); ++i) {
    const Bucket& bucket = layout_.buckets()[i];
    if (splits_main(bucket)) continue;
    const FlatRun held = main_is_whole(bucket) ? bucket.run() : updated(i);
    ops::axpby(ctx_, 1.0f, main_of(i, held), 0.0f, model_.narrow(0, held.begin, held.count));
  }
}

void ParamStore::gather_weights() {
  refresh_model_copy();
  for (std::size_t i = owned_.size(); i-- > 0;) spread_weights(i);
  wait_for_weights();
}

void ParamStore::spread_weights(std::size_t bucket) {
  if (!sharded_) return;
  wait_for_weights(bucket);
  const Bucket& b = layout_.buckets()[bucket];
  const FlatRun share = updated(bucket);
  const bool main = main_is_whole(b);
  const Tensor whole = main ? main_of(bucket, b.run()) : model_.narrow(0, b.begin, b.count);
  gathers_[bucket] = {
      options_.groups.data->all_gather(ctx_, whole.narrow(0, share.begin - b.begin, share.count), whole),
      true};
  ++gathers_running_;
  for (const ParamSlot& slot : layout_.slots_of(b)) {
    slot.parameter->set_gate([this, bucket] { wait_for_weights(bucket); });
  }
}

void ParamStore::wait_for_weights(std::size_t bucket) const {
  Gather& gather = gathers_[bucket];
  if (!gather.running) return;
  gather.pending.wait(ctx_);
  gather = {};
  --gathers_running_;
  const Bucket& b = layout_.buckets()[bucket];
  if (model_ && main_is_whole(b))
    ops::axpby(ctx_, 1.0f, main_of(bucket, b.run()), 0.0f, model_.narrow(0, b.begin, b.count));
}

void ParamStore::wait_for_weights() const {
  for (std::size_t i = owned_.size(); gathers_running_ > 0 && i-- > 0;) wait_for_weights(i);
}

Tensor ParamStore::gathered(const ParamSlot& slot, const Tensor& own) const {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < data_ranks_; ++rank) {
    const Bucket& bucket = layout_.buckets()[slot.bucket];
    counts.push_back(overlap(slot.run(), bucket.share(rank, data_ranks_)).count);
  }
  const Tensor whole = Tensor::empty(ctx_, {slot.numel}, own.dtype());
  options_.groups.data->all_gather(ctx_, own, whole, counts).wait(ctx_);
  return whole.view(slot.parameter->shape());
}

Tensor ParamStore::whole_main(const Parameter& parameter) const {
  const ParamSlot& slot = slots()[layout_.index_of(parameter)];
  wait_for_weights();
  if (main_is_whole(layout_.buckets()[slot.bucket]))
    return main_values(slot.bucket, slot.run()).read(ctx_).view(parameter.shape());
  return gathered(slot, main_values(slot.bucket, overlap(slot.run(), updated(slot.bucket))).read(ctx_));
}

Tensor ParamStore::whole_gradient(const Parameter& parameter) const {
  const ParamSlot& slot = slots()[layout_.index_of(parameter)];
  const auto scale = static_cast<float>(gradient_scale());
  const Tensor held = gradient_of(slot.bucket, overlap(slot.run(), updated(slot.bucket)));
  const Tensor own = Tensor::empty(ctx_, held.shape(), DType::f32);
  if (own.numel() > 0) ops::axpby(ctx_, scale, held, 0.0f, own);
  return sharded_ ? gathered(slot, own) : own.view(parameter.shape());
}

}  // namespace tessera
