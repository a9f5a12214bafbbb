#pragma once
#include "tessera/ops/moe.hpp"
#include "tessera/parallel/experts.hpp"

namespace tessera {

/// Rows of tokens, in the order of their experts, on their way to the ranks that hold these and back. Every
/// rank makes the same calls.
class ExpertExchange {
 public:
  /// `order` sorts this rank's rows by all experts, of which each rank holds `held`. The host reads how many
  /// rows there are of each; a planned pass, which sees no numbers, takes them for even.
  ExpertExchange(const ExecCtx& ctx, const ExpertParallel& parallel, const ops::SlotOrder& order,
                 std::int64_t held);

  /// Whether rows travel at all.
  bool travels() const { return comm_ != nullptr; }
  /// Rows that each expert of this rank has, from all ranks.
  const std::vector<std::int64_t>& counts() const { return counts_; }
  /// Rows [n, ...] of this rank's tokens; all ranks' rows of this one's experts, one expert after the other.
  Tensor to_experts(const ExecCtx& ctx, const Tensor& rows) const;
  /// The way back.
  Tensor to_tokens(const ExecCtx& ctx, const Tensor& rows) const;

 private:
  Tensor exchange(const ExecCtx& ctx, const Tensor& rows, const std::vector<std::int64_t>& sent,
                  const std::vector<std::int64_t>& received) const;

  Communicator* comm_ = nullptr;
  std::vector<std::int64_t> counts_;
  std::vector<std::int64_t> sent_, received_;  // rows, by rank
  /// Rows come rank by rank, each rank's in the order of experts. by_expert_[i]: which of them is row i in
  /// the order of experts; by_rank_ is the way back. int32.
  Tensor by_expert_, by_rank_;
};

}  // namespace tessera
