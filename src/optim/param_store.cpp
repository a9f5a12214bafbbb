#include "tessera/optim/param_store.hpp"

#include <string_view>
#include <unordered_set>

#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

void check_parameters(const std::vector<Parameter*>& parameters) {
  std::unordered_set<std::string_view> names;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter* p = parameters[i];
    TESSERA_CHECK(p != nullptr, "parameter ", i, " of a ParamStore is null");
    TESSERA_CHECK(names.insert(p->name()).second, "two parameters are named ", p->name(),
                  ": names key initial values and checkpoints; a shared weight is registered once");
    TESSERA_CHECK(p->shape().numel() > 0, "parameter ", p->name(), " has no elements: shape ", p->shape());
  }
}

/// As the generator wants it: rows times columns.
Tensor as_matrix(const Tensor& weight) {
  if (weight.rank() == 0) return weight.view({1});
  return weight.rank() <= 2 ? weight : weight.view({weight.size(0), -1});
}

}  // namespace

ParamStore::ParamStore(const ExecCtx& ctx, std::vector<Parameter*> parameters,
                       const ParamStoreOptions& options)
    : ctx_(ctx), options_(options), parameters_(std::move(parameters)) {
  TESSERA_CHECK(options_.compute == DType::f32 || options_.compute == DType::bf16,
                "parameters are computed with in float32 or bfloat16, not ", options_.compute);
  check_parameters(parameters_);
  lay_out();
  main_ = zeros();
  if (options_.compute == DType::bf16) model_ = Tensor::empty(ctx_, {numel_}, DType::bf16);
  if (options_.trainable) grad_ = zeros();
  for (const ParamSlot& slot : slots_) initialise(slot);
  refresh_model_copy();
  for (const ParamSlot& slot : slots_) {
    slot.parameter->bind(view(model_ ? model_ : main_, slot), grad_ ? view(grad_, slot) : Tensor(),
                         view(main_, slot));
  }
  clear_contributions();
}

void ParamStore::lay_out() {
  slots_.reserve(parameters_.size());
  for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it) {
    const std::int64_t count = (*it)->shape().numel();
    index_.emplace(*it, slots_.size());
    slots_.push_back({*it, numel_, count});
    numel_ += (count + kAlignment - 1) / kAlignment * kAlignment;
  }
}

void ParamStore::initialise(const ParamSlot& slot) {
  const Parameter& p = *slot.parameter;
  const Tensor weight = view(main_, slot);
  switch (p.init().kind) {
    case Init::Kind::zeros:
      break;  // the buffer is
    case Init::Kind::ones:
      ops::fill_constant(ctx_, weight, 1.0f);
      break;
    case Init::Kind::normal:
      ops::fill_normal(ctx_, as_matrix(weight), p.init().std,
                       {.seed = ctx_.seed, .site = site_of(p.name()), .step = 0}, {});
      break;
  }
}

const ParamSlot& ParamStore::slot_of(const Parameter& parameter) const {
  const auto it = index_.find(&parameter);
  TESSERA_CHECK(it != index_.end(), "parameter ", parameter.name(), " is not in this ParamStore");
  return slots_[it->second];
}

Tensor ParamStore::view(const Tensor& buffer, const ParamSlot& slot) const {
  return buffer.narrow(0, slot.offset, slot.numel).view(slot.parameter->shape());
}

Tensor ParamStore::view(const Tensor& buffer, const Parameter& parameter) const {
  TESSERA_CHECK(buffer && buffer.rank() == 1 && buffer.numel() == numel_, "a buffer of this ParamStore has ",
                numel_, " elements, not shape ", buffer.shape());
  return view(buffer, slot_of(parameter));
}

Tensor ParamStore::main(const Parameter& parameter) const { return view(main_, slot_of(parameter)); }

Tensor ParamStore::zeros() const {
  Tensor buffer = Tensor::empty(ctx_, {numel_}, DType::f32);
  ops::fill_zero(ctx_, buffer);
  return buffer;
}

void ParamStore::refresh_model_copy() {
  if (model_) ops::axpby(ctx_, 1.0f, main_, 0.0f, model_);
}

void ParamStore::clear_contributions() {
  for (Parameter* p : parameters_) p->clear_grad();
}

void ParamStore::begin_call() {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  if (finished_calls_ > 0 && !summed_) {
    if (!sum_) sum_ = Tensor::empty(ctx_, {numel_}, DType::f32);
    ops::axpby(ctx_, static_cast<float>(bucket_factor_), grad_, 0.0f, sum_);
    summed_ = true;
  }
  clear_contributions();
  open_ = true;
}

void ParamStore::finish_call(double factor) {
  TESSERA_CHECK(options_.trainable, "this ParamStore holds no gradients: it was made with trainable = false");
  TESSERA_CHECK(open_, "finish_call without begin_call after ", finished_calls_,
                " finished calls: the gradients of this call were added to those of the one before");
  for (Parameter* p : parameters_) {
    if (!p->has_grad()) ops::fill_zero(ctx_, p->grad());
  }
  if (summed_) {
    ops::axpby(ctx_, static_cast<float>(factor), grad_, 1.0f, sum_);
  } else {
    bucket_factor_ = factor;
  }
  open_ = false;
  ++finished_calls_;
}

FlatGradient ParamStore::gradients() const {
  TESSERA_CHECK(finished_calls_ > 0, "no gradients: no call was finished since the last update");
  return summed_ ? FlatGradient{sum_, 1.0} : FlatGradient{grad_, bucket_factor_};
}

void ParamStore::discard_gradients() {
  clear_contributions();
  finished_calls_ = 0;
  summed_ = false;
  open_ = true;
}

}  // namespace tessera
