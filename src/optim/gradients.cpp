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
  if (open_) reduction_->abandon();
  if (finished_calls_ > 0 && !summed_) {
    if (!sum_) sum_ = Tensor::empty(ctx_, {state_numel_}, DType::f32);
    add_to_sum(static_cast<float>(bucket_factor_), 0.0f);
    summed_ = true;
  }
  clear_contributions();
  reduction_->open(contributions);
  open_ = true;
}

void ParamStore::gradient_ready(Parameter& parameter) {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  reduction_->ready(parameter);
}

void ParamStore::finish_call(double factor) {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  TESSERA_CHECK(open_, "finish_call without begin_call after ", finished_calls_,
                " finished calls: the gradients of this call were added to those of the one before");
  reduction_->finish();
  if (summed_) {
    add_to_sum(static_cast<float>(factor), 1.0f);
  } else {
    bucket_factor_ = factor;
  }
  open_ = false;
  ++finished_calls_;
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

Tensor ParamStore::gradient_of(std::size_t bucket, const FlatRun& run) const {
  if (!summed_) return grad_.narrow(0, run.begin, run.count);
  const Owned& owned = owned_[bucket];
  return sum_.narrow(0, owned.state + run.begin - owned.run.begin, run.count);
}

void ParamStore::discard_gradients() {
  if (open_ && reduction_) reduction_->abandon();
  clear_contributions();
  if (reduction_) reduction_->open(nullptr);
  finished_calls_ = 0;
  summed_ = false;
  open_ = true;
}

}  // namespace tessera
