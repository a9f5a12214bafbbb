#pragma once
/// How data ranks share what a ParamStore holds.

#include <cstdint>
#include <vector>

#include "tessera/comm/communicator.hpp"
#include "tessera/optim/layout.hpp"

namespace tessera {

/// All of something in a bucket, or this rank's share of it.
enum class Held { whole, share };

/// What a rank holds of a bucket between two steps.
struct ShardPolicy {
  Held main = Held::whole;      ///< fp32 main weights
  Held model = Held::whole;     ///< what kernels read; a share is gathered for each use
  Held gradient = Held::whole;  ///< of one call; a share is added to after each pass
  Held state = Held::whole;     ///< the optimizer's, and the gradient of several calls

  /// A row of the table of ZeRO's stages. `kernels_read_main`: there is no copy that they read instead, so
  /// main weights are whole with it. Errors: InvalidArgument for a stage that is not in the table.
  static ShardPolicy of_zero(int stage, bool kernels_read_main);
};

/// Ranks that hold the same buckets, as they share them out. The groups outlive who is given them.
struct DataRanks {
  Communicator* data = nullptr;  ///< null: one rank, which shares nothing out
  /// Another group of the same ranks, for weights that are gathered beside sums of gradients; null = `data`.
  Communicator* gathering = nullptr;
  Communicator* copies = nullptr;  ///< those with the same shares, in other groups like `data`; null = none

  int rank() const { return data ? data->rank() : 0; }
  int size() const { return data ? data->size() : 1; }
};

/// Who updates what: by bucket, its policy, the elements this rank updates, and where these lie in buffers
/// that hold nothing else.
class Shards {
 public:
  Shards() = default;
  /// `layout` is kept by reference. `policies`: by bucket. `experts`: of the buckets that hold some.
  Shards(const FlatLayout& layout, std::vector<ShardPolicy> policies, const DataRanks& dense,
         const DataRanks& experts);

  /// Those of a bucket: `gathering` is given, and `copies` only where there are several.
  const DataRanks& ranks(const Bucket& bucket) const { return bucket.experts ? experts_ : dense_; }
  const DataRanks& ranks(std::size_t bucket) const { return ranks(layout_->buckets()[bucket]); }
  const DataRanks& dense() const { return dense_; }
  const DataRanks& experts() const { return experts_; }
  /// Whether this rank updates only its share of each bucket.
  bool sharded() const { return sharded_; }
  /// Whether it holds only its share of a call's gradients ...
  bool shares_gradient() const { return shares_gradient_; }
  /// ... and of the weights that kernels read, which are gathered for them (WeightWalk).
  bool shares_model() const { return shares_model_; }
  const ShardPolicy& policy(std::size_t bucket) const { return policies_[bucket]; }
  /// The elements of `bucket` this rank updates: all of them, or its share.
  const Range& updated(std::size_t bucket) const { return updated_[bucket]; }
  /// Of `bucket`, sharded or not, the elements this rank alone adds to norms: its share, or nothing where
  /// another copy of that does.
  Range share(std::size_t bucket) const {
    const DataRanks& ranks = this->ranks(bucket);
    const Range own = layout_->buckets()[bucket].share(ranks.rank(), ranks.size());
    return ranks.copies != nullptr && ranks.copies->rank() > 0 ? Range{own.begin, 0} : own;
  }
  /// Ranks that hold the same of such a bucket, and this one's place among them.
  struct Holders {
    int rank = 0, ranks = 1;
  };
  Holders holders(const Bucket& bucket, Held held) const;
  /// Elements of a buffer of what this rank updates.
  std::int64_t state_numel() const { return state_numel_; }
  /// Where elements `run` of updated(bucket) lie in such a buffer.
  Range in_state(std::size_t bucket, const Range& run) const {
    return {state_[bucket] + run.begin - updated_[bucket].begin, run.count};
  }
  /// All of a parameter, in its shape, of what every rank has of it. Collective over its data ranks.
  Tensor gathered(const ExecCtx& ctx, const ParamSlot& slot, const Tensor& own) const;

 private:
  const FlatLayout* layout_ = nullptr;
  DataRanks dense_, experts_;
  bool sharded_ = false, shares_gradient_ = false, shares_model_ = false;
  std::vector<ShardPolicy> policies_;
  std::vector<Range> updated_;
  std::vector<std::int64_t> state_;
  std::int64_t state_numel_ = 0;
};

}  // namespace tessera
