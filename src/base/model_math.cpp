#include "tessera/base/model_math.hpp"

#include "base/model_counts.hpp"

namespace tessera {

std::int64_t parameter_count(const ModelConfig& config) {
  return count_parameters<std::int64_t>(resolve(config));
}

std::int64_t matmul_weight_count(const ModelConfig& config) {
  return count_matmul_weights<std::int64_t>(resolve(config));
}

double flops_per_token(const ModelConfig& config, std::int64_t seq_length, FlopConvention convention) {
  const ModelConfig m = resolve(config);
  const double attention = static_cast<double>(m.num_layers) * static_cast<double>(m.num_heads * m.head_dim) *
                           static_cast<double>(seq_length);
  return 6.0 * count_matmul_weights<double>(m) +
         (convention == FlopConvention::causal ? 6.0 : 12.0) * attention;
}

}  // namespace tessera
