// What is trained, when that changes between calls.

#include "optim/reduction.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {

void ParamStore::make_reduction() {
  std::vector<FlatRun> runs;
  for (const Owned& owned : owned_) runs.push_back(owned.run);
  reduction_ =
      std::make_unique<GradientReduction>(ctx_, layout_, options_.groups, sharded_, grad_, runs, frozen_);
}

void ParamStore::set_frozen(const std::function<bool(const Parameter&)>& frozen) {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  TESSERA_CHECK(!closed_, "set_frozen before the last call's gradient was added, set aside or dropped");
  std::vector<bool> next;
  for (const ParamSlot& slot : slots()) next.push_back(frozen(*slot.parameter));
  if (next == frozen_) return;
  if (open_) reduction_->abandon();
  sum_up();  // the buckets are the next call's, and what is frozen in it must be zero there
  for (std::size_t i = 0; i < next.size(); ++i) {
    if (next[i] && !frozen_[i]) ops::fill_zero(ctx_, grad_.narrow(0, slots()[i].offset, slots()[i].numel));
  }
  frozen_ = std::move(next);
  clear_contributions();
  bind_all();
  make_reduction();
}

void ParamStore::restore_gradients(int calls, const std::function<bool(const Parameter&)>& has_gradient) {
  TESSERA_CHECK(calls > 0, "a gradient of ", calls, " calls");
  discard_gradients();
  if (!sum_) sum_ = Tensor::empty(ctx_, {state_numel_}, DType::f32);
  ops::fill_zero(ctx_, sum_);
  for (std::size_t i = 0; i < frozen_.size(); ++i) has_gradient_[i] = has_gradient(*slots()[i].parameter);
  summed_ = true;
  open_ = false;
  finished_calls_ = calls;
}

}  // namespace tessera
