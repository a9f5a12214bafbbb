#include "tessera/data/sampler.hpp"

#include <algorithm>

#include "tessera/base/error.hpp"

namespace tessera {

Sampler::Sampler(const SamplerOptions& options) : options_(options) {
  TESSERA_CHECK(options.total_samples >= 0, "total_samples = ", options.total_samples);
  TESSERA_CHECK(options.consumed_samples >= 0, "consumed_samples = ", options.consumed_samples);
  TESSERA_CHECK(options.micro_batch_size > 0, "micro_batch_size = ", options.micro_batch_size);
  TESSERA_CHECK(options.data_parallel_rank >= 0 && options.data_parallel_rank < options.data_parallel_size,
                "data_parallel_rank ", options.data_parallel_rank, " of ", options.data_parallel_size);
}

bool Sampler::next(std::vector<std::int64_t>& indices) {
  indices.clear();
  const std::int64_t begin = options_.consumed_samples;
  const std::int64_t chunk = options_.micro_batch_size * options_.data_parallel_size;
  const std::int64_t left = options_.total_samples - begin;
  if (left <= 0 || (left < chunk && options_.drop_last)) return false;
  const std::int64_t first = begin + options_.data_parallel_rank * options_.micro_batch_size;
  const std::int64_t end = std::min(first + options_.micro_batch_size, options_.total_samples);
  for (std::int64_t i = first; i < end; ++i) indices.push_back(i);
  options_.consumed_samples += std::min(chunk, left);
  return true;
}

}  // namespace tessera
