#pragma once
/// The parameters of one rank, declared without memory, and what follows from where they lie.

#include <memory>
#include <vector>

#include "tessera/engine/plan.hpp"
#include "tessera/nn/models/decoder.hpp"
#include "tessera/optim/layout.hpp"

namespace tessera::detail {

/// Ranks of a tensor group that are only asked for their place, never to communicate.
using PaperGroup = std::vector<std::shared_ptr<Communicator>>;
PaperGroup make_paper_group(int size);

class DeclaredRank {
 public:
  /// `config` is resolved, `tensor` has config.parallel.tensor ranks.
  DeclaredRank(const Config& config, const MeshShape& mesh, const PaperGroup& tensor, int stage,
               int tensor_rank);

  std::int64_t parameters() const { return parameters_; }
  /// Bytes of what crosses the boundary before one of this rank's pieces, and the one behind it, for one
  /// micro-batch: every port of the model counts.
  std::int64_t input_bytes(int chunk) const;
  std::int64_t output_bytes(int chunk) const;
  /// Weights, copies, gradients, optimizer state; the same on every data rank.
  void add_memory(std::vector<MemoryTerm>& terms) const;
  /// Gradients to their sums and weights back, once per step.
  void add_traffic(int data_rank, std::vector<TrafficTerm>& terms) const;

 private:
  bool sharded() const { return zero_stage_ == 1 && mesh_.dp > 1; }
  bool main_is_whole(const Bucket& bucket) const { return !sharded() || !has_copy_ || bucket.reads_main; }
  /// Of fp32 weights only the low 16 bits are kept beside the copy.
  bool splits_main(const Bucket& bucket) const { return split_ && !bucket.reads_main; }
  Range updated(const Bucket& bucket, int data_rank) const {
    return sharded() ? bucket.share(data_rank, mesh_.dp) : bucket.run();
  }
  void add_data_traffic(std::vector<TrafficTerm>& terms) const;

  MeshShape mesh_;
  MicroBatchSize micro_batch_;
  int stage_, tensor_rank_, zero_stage_;
  bool has_copy_;         // kernels read 16-bit copies of the main weights
  bool split_;            // optimizer.split_main_weights
  std::int64_t moments_;  // fp32 buffers of optimizer state
  std::unique_ptr<Decoder> model_;
  FlatLayout layout_;
  std::int64_t parameters_ = 0;
};

}  // namespace tessera::detail
