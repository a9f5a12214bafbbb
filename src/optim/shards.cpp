#include "tessera/optim/shards.hpp"

#include <algorithm>
#include <array>

namespace tessera {
namespace {

/// ZeRO's stages, by number. A copy that kernels read is whole while they do.
constexpr std::array kZero{
    ShardPolicy{},
    ShardPolicy{.main = Held::share, .state = Held::share},
    ShardPolicy{.main = Held::share, .gradient = Held::share, .state = Held::share},
    ShardPolicy{.main = Held::share, .model = Held::share, .gradient = Held::share, .state = Held::share},
};

}  // namespace

ShardPolicy ShardPolicy::of_zero(int stage, bool kernels_read_main) {
  TESSERA_CHECK(stage >= 0 && stage < static_cast<int>(kZero.size()), "zero_stage is ", stage,
                "; 0 to 3 are there");
  ShardPolicy policy = kZero[static_cast<std::size_t>(stage)];
  if (kernels_read_main) policy.main = policy.model;
  return policy;
}

Shards::Shards(const FlatLayout& layout, std::vector<ShardPolicy> policies, const DataRanks& dense,
               const DataRanks& experts)
    : layout_(&layout), dense_(dense), experts_(experts), policies_(std::move(policies)) {
  for (std::size_t i = 0; i < policies_.size(); ++i) {
    const Bucket& bucket = layout.buckets()[i];
    const bool shared = policies_[i].state == Held::share;
    sharded_ = sharded_ || shared;
    shares_gradient_ = shares_gradient_ || policies_[i].gradient == Held::share;
    shares_model_ = shares_model_ || policies_[i].model == Held::share;
    updated_.push_back(shared ? bucket.share(ranks(i).rank(), ranks(i).size()) : bucket.run());
    state_.push_back(state_numel_);
    state_numel_ += updated_.back().count;
  }
  for (DataRanks* ranks : {&dense_, &experts_}) {
    if (ranks->gathering == nullptr) ranks->gathering = ranks->data;
    if (ranks->copies != nullptr && ranks->copies->size() == 1) ranks->copies = nullptr;
    if (ranks->size() == 1 && !sharded_) ranks->data = nullptr;
  }
}

Shards::Holders Shards::holders(const Bucket& bucket, Held held) const {
  const auto& [data, gathering, copies] = ranks(bucket);
  const int copy = copies ? copies->rank() : 0, number = copies ? copies->size() : 1;
  if (held == Held::share) return {copy, number};
  return {copy * ranks(bucket).size() + ranks(bucket).rank(), number * ranks(bucket).size()};
}

Tensor Shards::gathered(const ExecCtx& ctx, const ParamSlot& slot, const Tensor& own) const {
  const Bucket& bucket = layout_->buckets()[slot.bucket];
  const DataRanks& ranks = this->ranks(bucket);
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < ranks.size(); ++rank)
    counts.push_back(overlap(slot.run(), bucket.share(rank, ranks.size())).count);
  const Tensor whole = Tensor::empty(ctx, {slot.numel}, own.dtype());
  ranks.data->all_gather(ctx, own, whole, counts).wait(ctx);
  return whole.view(slot.parameter->shape());
}

}  // namespace tessera
