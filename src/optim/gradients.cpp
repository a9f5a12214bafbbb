// The life of a gradient: calls, their sum, what an update takes.

#include "optim/reduction.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {

void ParamStore::clear_contributions() {
  for (Parameter* p : parameters_) p->clear_grad();
}

void ParamStore::add_to_sum(float factor, float beta) {
  for (std::size_t i = 0; i < owned_.size(); ++i) {
    const Owned& owned = owned_[i];
    ops::axpby(ctx_, factor, grad_.narrow(0, owned.run.begin, owned.run.count), beta,
               sum_.narrow(0, owned.state, owned.run.count));
  }
}

void ParamStore::begin_call(const std::function<int(const Parameter&)>& contributions) {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  TESSERA_CHECK(!closed_, "begin_call before the last call's gradient was added, set aside or dropped");
  if (open_) reduction_->abandon();
  sum_up();
  clear_contributions();
  reduction_->open(contributions);
  open_ = true;
}

void ParamStore::gradient_ready(Parameter& parameter) {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  reduction_->ready(parameter);
}

void ParamStore::close_call() {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  TESSERA_CHECK(open_, "finish_call without begin_call after ", finished_calls_,
                " finished calls: the gradients of this call were added to those of the one before");
  reduction_->finish();
  open_ = false;
  closed_ = true;
}

void ParamStore::add_call(double factor) {
  TESSERA_CHECK(closed_, "add_call needs a close_call before it");
  closed_ = false;
  if (summed_) {
    add_to_sum(static_cast<float>(factor), 1.0f);
  } else {
    bucket_factor_ = factor;
  }
  note_gradients();
}

void ParamStore::finish_call(double factor) {
  close_call();
  add_call(factor);
}

Tensor ParamStore::set_call_aside() {
  TESSERA_CHECK(closed_, "set_call_aside needs a close_call before it");
  Tensor aside = Tensor::empty(ctx_, {state_numel_}, DType::f32);
  for (const Owned& owned : owned_) {
    ops::copy(ctx_, grad_.narrow(0, owned.run.begin, owned.run.count),
              aside.narrow(0, owned.state, owned.run.count));
  }
  drop_call();
  return aside;
}

void ParamStore::drop_call() {
  TESSERA_CHECK(closed_, "drop_call needs a close_call before it");
  closed_ = false;
}

void ParamStore::add_set_aside(const Tensor& gradient, double factor) {
  TESSERA_CHECK(gradient && gradient.numel() == state_numel_, "a gradient set aside has ", state_numel_,
                " elements, not shape ", gradient.shape());
  const bool first = finished_calls_ == 0;
  if (!first) sum_up();
  if (!sum_) sum_ = Tensor::empty(ctx_, {state_numel_}, DType::f32);
  ops::axpby(ctx_, static_cast<float>(factor), gradient, first ? 0.0f : 1.0f, sum_);
  summed_ = true;
  note_gradients();
}

/// Another call was finished: what is trained now was trained in it.
void ParamStore::note_gradients() {
  for (std::size_t i = 0; i < frozen_.size(); ++i) {
    if (!frozen_[i]) has_gradient_[i] = true;
  }
  ++finished_calls_;
  ++gradient_version_;
}

void ParamStore::sum_up() {
  if (summed_ || finished_calls_ == 0) return;
  if (!sum_) sum_ = Tensor::empty(ctx_, {state_numel_}, DType::f32);
  add_to_sum(static_cast<float>(bucket_factor_), 0.0f);
  summed_ = true;
  ++gradient_version_;
}

FlatGradient ParamStore::gradients() const {
  const double scale = gradient_scale();
  TESSERA_CHECK(!sharded_, "this rank holds a share of the gradient: whole_gradient gathers it");
  return {summed_ ? sum_ : grad_, scale};
}

double ParamStore::gradient_scale() const {
  TESSERA_CHECK(finished_calls_ > 0, "no gradients: no call was finished since the last update");
  return summed_ ? 1.0 : bucket_factor_;
}

ParamStore::PendingGradient ParamStore::pending_gradient() const {
  gradient_scale();  // refuses where there is none
  return {summed_ ? sum_ : grad_, summed_};
}

Tensor ParamStore::gradient_of(std::size_t bucket, const FlatRun& run) const {
  if (!summed_) return grad_.narrow(0, run.begin, run.count);
  return sum_.narrow(0, in_state(bucket, run).begin, run.count);
}

void ParamStore::forget_gradients() {
  if (!closed_) return discard_gradients();
  has_gradient_.assign(frozen_.size(), false);
  finished_calls_ = 0;
  ++gradient_version_;
  summed_ = false;
}

void ParamStore::discard_gradients() {
  if (open_ && reduction_) reduction_->abandon();
  clear_contributions();
  if (reduction_) reduction_->open(nullptr);
  has_gradient_.assign(frozen_.size(), false);
  finished_calls_ = 0;
  ++gradient_version_;
  summed_ = closed_ = false;
  open_ = true;
}

}  // namespace tessera
