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

Shards::Shards(const FlatLayout& layout, Communicator* data, std::vector<ShardPolicy> policies,
               Communicator* gathering, Communicator* copies)
    : layout_(&layout),
      data_(data),
      gathering_(gathering != nullptr ? gathering : data),
      copies_(copies != nullptr && copies->size() > 1 ? copies : nullptr),
      rank_(data != nullptr ? data->rank() : 0),
      ranks_(data != nullptr ? data->size() : 1),
      policies_(std::move(policies)) {
  for (std::size_t i = 0; i < policies_.size(); ++i) {
    const bool shared = policies_[i].state == Held::share;
    sharded_ = sharded_ || shared;
    shares_gradient_ = shares_gradient_ || policies_[i].gradient == Held::share;
    shares_model_ = shares_model_ || policies_[i].model == Held::share;
    updated_.push_back(shared ? layout.buckets()[i].share(rank_, ranks_) : layout.buckets()[i].run());
    state_.push_back(state_numel_);
    state_numel_ += updated_.back().count;
  }
  if (ranks_ == 1 && !sharded_) data_ = nullptr;
}

Shards::Holders Shards::holders(Held held) const {
  const int copy = copies_ ? copies_->rank() : 0, copies = copies_ ? copies_->size() : 1;
  if (held == Held::share) return {copy, copies};
  return {copy * ranks_ + rank_, copies * ranks_};
}

Tensor Shards::gathered(const ExecCtx& ctx, const ParamSlot& slot, const Tensor& own) const {
  const Bucket& bucket = layout_->buckets()[slot.bucket];
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < ranks_; ++rank)
    counts.push_back(overlap(slot.run(), bucket.share(rank, ranks_)).count);
  const Tensor whole = Tensor::empty(ctx, {slot.numel}, own.dtype());
  data_->all_gather(ctx, own, whole, counts).wait(ctx);
  return whole.view(slot.parameter->shape());
}

}  // namespace tessera
