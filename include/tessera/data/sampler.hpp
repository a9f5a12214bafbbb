#pragma once
/// Megatron's single sampler: which samples a data-parallel rank reads, in which order.

#include <cstdint>
#include <vector>

namespace tessera {

struct SamplerOptions {
  std::int64_t total_samples = 0;
  std::int64_t consumed_samples = 0;  ///< by all ranks so far
  std::int64_t micro_batch_size = 1;
  std::int64_t data_parallel_rank = 0;
  std::int64_t data_parallel_size = 1;
  bool drop_last = true;  ///< leave out a last chunk shorter than micro_batch_size * data_parallel_size
};

/// Walks the samples in chunks of micro_batch_size * data_parallel_size; rank r takes [r, r + 1) *
/// micro_batch_size of each.
class Sampler {
 public:
  /// Errors: InvalidArgument for impossible numbers.
  explicit Sampler(const SamplerOptions& options);

  /// The next micro-batch of this rank in `indices`; false at the end.
  bool next(std::vector<std::int64_t>& indices);
  /// Samples consumed by all ranks after the micro-batches handed out.
  std::int64_t consumed_samples() const { return options_.consumed_samples; }

 private:
  SamplerOptions options_;
};

}  // namespace tessera
