#pragma once
/// T5's buckets of distances between query and key.

#include "tessera/base/config_model.hpp"
#include "tessera/device/exec_ctx.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::nn {

/// Bucket of a key `relative` positions behind its query (negative: before it). Short distances have one
/// each, longer ones share them by their logarithm, and from `most` on all are in the last. `both_sides`:
/// keys behind the query have half of them; otherwise they count as the query itself.
std::int64_t relative_bucket(std::int64_t relative, bool both_sides, std::int64_t buckets, std::int64_t most);

/// Tables of buckets, made once: shorter sequences read a part of them.
class RelativePositions {
 public:
  static constexpr std::int64_t kMost = std::int64_t{1} << 24;

  /// `config` must outlive it.
  explicit RelativePositions(const ModelConfig& config) : config_(config) {}
  explicit RelativePositions(ModelConfig&&) = delete;
  /// For max_positions, on first use.
  void make(const ExecCtx& ctx);
  /// Sees to sequences of `positions`. Returns how long they may be; 0 = nothing is made yet.
  std::int64_t reserve(const ExecCtx& ctx, std::int64_t positions);
  /// [2 length - 1] int32: entry i - j + length - 1 is the bucket of query i and key j.
  Tensor buckets(std::int64_t length, bool both_sides) const;

 private:
  void make(const ExecCtx& ctx, std::int64_t positions);

  const ModelConfig& config_;
  std::int64_t positions_ = 0;
  Tensor both_, before_;  // [2 positions - 1]
};

}  // namespace tessera::nn
