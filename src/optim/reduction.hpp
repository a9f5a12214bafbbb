#pragma once
/// GradientReduction: one call's gradients from the ranks that made them to their sums.

#include <deque>
#include <functional>
#include <vector>

#include "tessera/optim/param_store.hpp"

namespace tessera {

class GradientReduction {
 public:
  /// `layout`, `shards` and the groups are kept by reference. `grad`: all buckets, or with
  /// shards.shares_gradient() this rank's shares, one after the other, kept by reference. `frozen`: by slot,
  /// whose gradients are zero in `grad` and stay so on all ranks; a bucket of nothing else is not reduced.
  GradientReduction(const ExecCtx& ctx, const FlatLayout& layout, const StoreGroups& groups,
                    const Shards& shards, const GradientMemory& grad, std::vector<bool> frozen);

  /// Starts a call; with counts, buckets are reduced as they become complete.
  void open(const std::function<int(const Parameter&)>& contributions);
  void ready(const Parameter& parameter);
  /// Shares: memory for the gradients of a bucket, zeros, until it is reduced.
  void provide(std::size_t bucket);
  void begin_pass(std::vector<std::size_t> buckets);
  void complete(const std::vector<std::size_t>& buckets);
  void end_pass();
  void settle() { settle_shares(0); }
  std::size_t passing_bytes() const;
  /// Reduces what is left and waits for everything.
  void finish();
  /// Ends a call that nobody finished. One with counts may have started reductions on some ranks only: the
  /// others are made up for, so that all ranks stay in step.
  void abandon();

 private:
  /// Sums over the ranks of one group, of pieces that lie alike on all of them.
  struct ReplicatedSum {
    Communicator* group = nullptr;
    std::vector<Range> runs;
    std::int64_t elements = 0;
  };

  /// A sum on its way, maybe in another dtype than that of `target`.
  struct Sum {
    Tensor held;            ///< all of what is summed, kept until it is over
    Tensor target, result;  ///< result: where the sum comes to be
    Pending pending;
  };

  /// Over `group`, of `whole`, of which this rank gets block `own`, or all of it.
  Sum start_sum(Communicator& group, const Tensor& whole, const Range& own) const;
  void finish_sum(const Sum& sum) const;
  void find_sums(const StoreGroups& groups);
  void add_sum(Communicator* group, const std::vector<Range>& wanted);
  void start(std::size_t bucket);
  void finish_buckets();
  void run(const ReplicatedSum& sum) const;
  bool trains(std::size_t bucket) const;
  void sum_over_copies() const;
  // Shares.
  void start_next();
  void start_share(std::size_t bucket);
  void settle_shares(std::size_t left);
  void finish_shares();
  void unbind(std::size_t bucket);
  void forget_memory();

  ExecCtx ctx_;
  const FlatLayout& layout_;
  const Shards& shards_;
  const GradientMemory& grad_;
  std::vector<bool> frozen_;
  std::vector<ReplicatedSum> sums_;
  bool counting_ = false;
  std::vector<int> remaining_;           // contributions, by slot
  std::vector<std::size_t> incomplete_;  // parameters, by bucket
  std::size_t started_ = 0;              // buckets
  std::vector<Sum> running_;             // of the started ones
  DType sent_;
  // Shares: of this call.
  std::vector<Tensor> memory_;      // of whole buckets, by bucket, while they are written to
  std::vector<bool> reduced_;       // by bucket
  std::vector<std::size_t> order_;  // buckets of the pass that are still to be started, the last one first
  bool in_pass_ = false;
  struct Leaving {
    std::size_t bucket = 0;
    Sum sum;
  };
  std::deque<Leaving> leaving_;  // in the order they were started
};

}  // namespace tessera
