#include "tessera/optim/param_store.hpp"

#include "optim/reduction.hpp"
#include "optim/runs.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

int size_of_group(const Communicator* group) { return group ? group->size() : 1; }

void check_options(const ParamStoreOptions& options) {
  TESSERA_CHECK(
      options.compute == DType::f32 || options.compute == DType::bf16 || options.compute == DType::f16,
      "parameters are computed with in float32, bfloat16 or float16, not ", options.compute);
  TESSERA_CHECK(!options.split_main || options.compute == DType::bf16,
                "split main weights need bfloat16 parameters, not ", options.compute);
  TESSERA_CHECK(options.zero_stage == 0 || options.zero_stage == 1, "zero_stage is ", options.zero_stage,
                "; 0 and 1 are there");
  const StoreGroups& groups = options.groups;
  for (const Communicator* group : {groups.data, groups.tensor, groups.embedding}) {
    TESSERA_CHECK(size_of_group(group) <= size_of_group(groups.world), "group ", group ? group->name() : "",
                  " has ", size_of_group(group), " ranks, the world ", size_of_group(groups.world),
                  ": the global norm is taken over StoreGroups::world");
  }
}

}  // namespace

ParamStore::ParamStore(const ExecCtx& ctx, std::vector<Parameter*> parameters,
                       const ParamStoreOptions& options)
    : ctx_(ctx), options_(options), parameters_(std::move(parameters)) {
  check_options(options_);
  data_ranks_ = size_of_group(options_.groups.data);
  data_rank_ = options_.groups.data ? options_.groups.data->rank() : 0;
  sharded_ = options_.trainable && options_.zero_stage == 1 && data_ranks_ > 1;
  const LayoutOptions plain{.data_ranks = data_ranks_, .bucket_elements = options_.bucket_elements};
  layout_ = FlatLayout(parameters_, plain);
  if (size_of_group(options_.groups.tensor) > 1) {
    const std::vector<std::int64_t> largest = capacities();
    layout_ = FlatLayout(
        parameters_,
        {.data_ranks = data_ranks_, .bucket_elements = options_.bucket_elements, .capacities = largest});
  }
  for (const ParamSlot& slot : slots())
    frozen_.push_back(options_.trainable && options_.frozen && options_.frozen(*slot.parameter));
  divide();
  allocate();
  initialise_all();
  bind_all();
  has_gradient_.assign(frozen_.size(), false);
  if (options_.trainable) make_reduction();
  clear_contributions();
}

ParamStore::~ParamStore() {
  if (!sharded_) return;
  for (Parameter* p : parameters_) p->set_gate(nullptr);
}

/// Elements of the largest part of each parameter on any tensor rank.
std::vector<std::int64_t> ParamStore::capacities() const {
  std::vector<std::int64_t> sizes;
  for (const Parameter* p : parameters_) sizes.push_back(p->placement().largest());
  if (sizes.empty()) return sizes;
  const ExecCtx host = ExecCtx::cpu(1);
  const Tensor exchanged = Tensor::from(host, sizes, {static_cast<std::int64_t>(sizes.size())});
  options_.groups.tensor->all_reduce(host, exchanged, ReduceOp::max).wait(host);
  return exchanged.to_vector<std::int64_t>();
}

bool ParamStore::main_is_whole(const Bucket& bucket) const {
  return !sharded_ || options_.compute == DType::f32 || bucket.reads_main;
}

void ParamStore::divide() {
  for (const Bucket& bucket : layout_.buckets()) {
    std::int64_t& held = splits_main(bucket) ? low_numel_ : main_numel_;
    Owned owned{bucket.run(), state_numel_, held};
    if (sharded_) owned.run = bucket.share(data_rank_, data_ranks_);
    if (main_is_whole(bucket)) owned.main += owned.run.begin - bucket.begin;
    state_numel_ += owned.run.count;
    held += main_is_whole(bucket) ? bucket.count : owned.run.count;
    owned_.push_back(owned);
  }
  gathers_.resize(owned_.size());
}

void ParamStore::allocate() {
  const auto zeroed = [&](std::int64_t n, DType dtype) {
    Tensor buffer = Tensor::empty(ctx_, {n}, dtype);
    ops::fill_zero(ctx_, buffer);
    return buffer;
  };
  main_ = zeroed(main_numel_, DType::f32);
  if (options_.split_main) low_ = zeroed(low_numel_, DType::u16);
  if (options_.trainable) grad_ = zeroed(numel(), DType::f32);
  if (options_.compute != DType::f32) model_ = zeroed(numel(), options_.compute);
}

void ParamStore::initialise(const ParamSlot& slot, const Tensor& weight) const {
  const Parameter& p = *slot.parameter;
  const Placement& placement = p.placement();
  if (p.init().kind == Init::Kind::zeros) return;  // the buffers are
  if (p.init().kind == Init::Kind::ones) return ops::fill_constant(ctx_, weight, 1.0f);
  // A matrix whose columns are the split dimension and all after it; whole parameters are one row.
  const RngKey key{.seed = ctx_.seed, .site = site_of(p.name()), .step = 0};
  if (placement.is_replicated()) return ops::fill_normal(ctx_, weight.view({1, -1}), p.init().std, key, {});
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
}

/// `scratch`: zeros [slot.numel].
void ParamStore::initialise_from_scratch(const ParamSlot& slot, const Tensor& scratch) {
  initialise(slot, scratch.view(slot.parameter->shape()));
  const FlatRun own = overlap(slot.run(), updated(slot.bucket));
  const Tensor part = scratch.narrow(0, own.count > 0 ? own.begin - slot.offset : 0, own.count);
  if (!splits_main(layout_.buckets()[slot.bucket])) {
    ops::axpby(ctx_, 1.0f, scratch, 0.0f, model_.narrow(0, slot.offset, slot.numel));
    if (own.count > 0) ops::copy(ctx_, part, main_of(slot.bucket, own));
    return;
  }
  // The others' shares are rounded like our own.
  const Tensor others = Tensor::empty(ctx_, {slot.numel}, DType::u16);
  ops::split_main(ctx_, scratch, model_.narrow(0, slot.offset, slot.numel), others);
  if (own.count > 0) {
    const StateValues target = main_values(slot.bucket, own);
    ops::split_main(ctx_, part, target.values, target.low);
  }
}

void ParamStore::initialise_all() {
  bool borrowed = false;
  for (const ParamSlot& slot : slots()) {
    const Bucket& bucket = layout_.buckets()[slot.bucket];
    if (main_is_whole(bucket) && !splits_main(bucket)) {
      initialise(slot, main_of(slot.bucket, slot.run()).view(slot.parameter->shape()));
      continue;
    }
    // This rank does not keep all of it in fp32: the gradient buffer lends the space.
    Tensor scratch;
    if (grad_) {
      scratch = grad_.narrow(0, slot.offset, slot.numel);
      borrowed = true;
    } else {
      scratch = Tensor::empty(ctx_, {slot.numel}, DType::f32);
      ops::fill_zero(ctx_, scratch);
    }
    initialise_from_scratch(slot, scratch);
  }
  if (borrowed) ops::fill_zero(ctx_, grad_);
  refresh_model_copy();
}

void ParamStore::bind_all() {
  for (std::size_t i = 0; i < slots().size(); ++i) {
    const ParamSlot& slot = slots()[i];
    const Bucket& bucket = layout_.buckets()[slot.bucket];
    Tensor main;
    if (main_is_whole(bucket) && !splits_main(bucket))
      main = main_of(slot.bucket, slot.run()).view(slot.parameter->shape());
    const bool trained = grad_ && !frozen_[i];
    slot.parameter->bind(model_ ? view(model_, slot) : main, trained ? view(grad_, slot) : Tensor(), main);
  }
}

std::size_t ParamStore::persistent_bytes() const {
  std::size_t bytes = 0;
  for (const Tensor* buffer : {&main_, &low_, &model_, &grad_, &sum_}) {
    if (*buffer) bytes += buffer->nbytes();
  }
  return bytes;
}

Tensor ParamStore::main_of(std::size_t bucket, const FlatRun& run) const {
  const Owned& owned = owned_[bucket];
  return main_.narrow(0, owned.main + run.begin - owned.run.begin, run.count);
}

StateValues ParamStore::main_values(std::size_t bucket, const FlatRun& run) const {
  if (!splits_main(layout_.buckets()[bucket])) return {main_of(bucket, run)};
  const Owned& owned = owned_[bucket];
  return {model_.narrow(0, run.begin, run.count),
          low_.narrow(0, owned.main + run.begin - owned.run.begin, run.count)};
}

Tensor ParamStore::view(const Tensor& buffer, const ParamSlot& slot) const {
  return buffer.narrow(0, slot.offset, slot.numel).view(slot.parameter->shape());
}

Tensor ParamStore::view(const Tensor& buffer, const Parameter& parameter) const {
  TESSERA_CHECK(buffer && buffer.rank() == 1 && buffer.numel() == numel(), "a buffer of this ParamStore has ",
                numel(), " elements, not shape ", buffer.shape());
  wait_for_weights();
  return view(buffer, slots()[layout_.index_of(parameter)]);
}

Tensor ParamStore::main_buffer() const {
  wait_for_weights();
  return main_numel_ == numel() ? main_ : Tensor();
}

const Tensor& ParamStore::model_buffer() const {
  wait_for_weights();
  return model_;
}

Tensor ParamStore::main(const Parameter& parameter) const {
  const ParamSlot& slot = slots()[layout_.index_of(parameter)];
  const Bucket& bucket = layout_.buckets()[slot.bucket];
  TESSERA_CHECK(main_is_whole(bucket) && !splits_main(bucket), "this rank holds ",
                splits_main(bucket) ? "the two halves" : "a share", " of the main weights of ",
                parameter.name(), ": whole_main gathers them, pieces gives what is here");
  wait_for_weights();
  return main_of(slot.bucket, slot.run()).view(parameter.shape());
}

Tensor ParamStore::zeros() const {
  Tensor buffer = Tensor::empty(ctx_, {state_numel_}, DType::f32);
  ops::fill_zero(ctx_, buffer);
  return buffer;
}

}  // namespace tessera
