#include "tessera/optim/param_store.hpp"

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
  ShardPolicy::of_zero(options.zero_stage, false);  // refuses stages that are not there
  const StoreGroups& groups = options.groups;
  TESSERA_CHECK(size_of_group(groups.data) % groups.experts.size() == 0, groups.experts.size(),
                " ranks hold the same experts, which does not divide the ", size_of_group(groups.data),
                " data ranks");
  for (const Communicator* group :
       {groups.data, groups.copies, groups.experts.data, groups.tensor, groups.embedding}) {
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
  const int ranks = size_of_group(options_.groups.data);
  std::vector<int> units;
  for (const Parameter* p : parameters_) {
    if (options_.unit && p != nullptr) units.push_back(options_.unit(*p));
  }
  LayoutOptions plain{.data_ranks = ranks, .bucket_elements = options_.bucket_elements, .units = units};
  layout_ = FlatLayout(parameters_, plain);
  if (size_of_group(options_.groups.tensor) > 1) {
    const std::vector<std::int64_t> largest = capacities();
    plain.capacities = largest;
    layout_ = FlatLayout(parameters_, plain);
  }
  std::vector<ShardPolicy> policies;
  const OffloadConfig& offload = options_.offload;
  const bool passes = offload.gradients != OffloadTo::none || offload.parameters != OffloadTo::none;
  const int stage = options_.trainable && (ranks > 1 || passes) ? options_.zero_stage : 0;
  for (const Bucket& bucket : layout_.buckets())
    policies.push_back(ShardPolicy::of_zero(stage, options_.compute == DType::f32 || bucket.reads_main));
  const auto& groups = options_.groups;
  shards_ =
      Shards(layout_, std::move(policies), {groups.data, groups.gathering, groups.copies}, groups.experts);
  for (const ParamSlot& slot : slots())
    frozen_.push_back(options_.trainable && options_.frozen && options_.frozen(*slot.parameter));
  if (options_.trainable && (passes || offload.optimizer != OffloadTo::none)) {
    const Communicator* world = options_.groups.world;
    place_ = std::make_shared<OffloadPlace>(ctx_, offload, world ? world->rank() : 0);
  }
  weights_.emplace(
      ctx_, layout_, shards_,
      Weights::Options{.compute = options_.compute, .split_main = options_.split_main, .place = place_});
  gradient_.emplace(ctx_, layout_, shards_, options_.groups, options_.trainable, frozen_, place_);
  weights_->initialise(shards_.shares_gradient() ? Tensor() : gradient_->latest_call().on_device());
  bind_all();
  walk_.emplace(layout_, shards_, *weights_);
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

void ParamStore::bind_all() {
  for (std::size_t i = 0; i < slots().size(); ++i) {
    const ParamSlot& slot = slots()[i];
    const auto [value, main] = weights_->views(slot);
    slot.parameter->bind(value, {}, main);
    gradient_->bind(i);
  }
}

void ParamStore::set_frozen(const std::function<bool(const Parameter&)>& frozen) {
  std::vector<bool> next;
  for (const ParamSlot& slot : slots()) next.push_back(frozen(*slot.parameter));
  gradient_->set_frozen(next);
  frozen_ = std::move(next);
  bind_all();
}

Tensor ParamStore::view(const Tensor& buffer, const Parameter& parameter) const {
  TESSERA_CHECK(buffer && buffer.rank() == 1 && buffer.numel() == numel(), "a buffer of this ParamStore has ",
                numel(), " elements, not shape ", buffer.shape());
  weights_->wait();
  const ParamSlot& slot = layout_.slot_of(parameter);
  return buffer.narrow(0, slot.offset, slot.numel).view(parameter.shape());
}

Tensor ParamStore::zeros() const {
  Tensor buffer = Tensor::empty(ctx_, {shards_.state_numel()}, DType::f32);
  ops::fill_zero(ctx_, buffer);
  return buffer;
}

ParamStore::Slice ParamStore::slice(std::size_t bucket, const Range& run) const {
  return {gradient_->of(bucket, run).values, weights_->target(bucket, run), shards_.in_state(bucket, run)};
}

}  // namespace tessera
