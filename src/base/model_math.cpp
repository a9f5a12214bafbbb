#include "tessera/base/model_math.hpp"

#include "base/model_counts.hpp"
#include "tessera/base/config.hpp"

namespace tessera {

std::int64_t parameter_count(const ModelConfig& config) { return count_parameters<std::int64_t>(config); }

std::int64_t matmul_weight_count(const ModelConfig& config) {
  return count_matmul_weights<std::int64_t>(config, config.router_topk);
}

double flops_per_token(const ModelConfig& m, std::int64_t seq_length, FlopConvention convention) {
  double keys = 0;  // of all layers, as if each position saw all of them
  const auto all = static_cast<double>(seq_length);
  for (std::int64_t i = 0; i < m.num_layers; ++i) {
    const auto window = static_cast<double>(window_of(m, i));
    keys += window == 0 || window >= all ? all : (2 * window * (all - window) + window * window) / all;
  }
  const double attention = static_cast<double>(m.num_heads * m.head_dim) * keys;
  return 6.0 * count_matmul_weights<double>(m, m.router_topk) +
         (convention == FlopConvention::causal ? 6.0 : 12.0) * attention;
}

double two_stack_flops_per_token(const ModelConfig& m, const SampleLengths& lengths) {
  const auto encoder = static_cast<double>(*m.encoder_layers), read = static_cast<double>(lengths.encoder);
  const auto decoder = static_cast<double>(m.num_layers) - encoder,
             said = static_cast<double>(lengths.tokens);
  const auto width = static_cast<double>(m.hidden_size),
             heads = static_cast<double>(m.num_heads * m.head_dim);
  const double attended = 2 * heads * width;  // queries, and the product behind attention
  const double keys = 2 * static_cast<double>(m.num_kv_heads * m.head_dim) * width;
  const double mlp = (is_gated(m.activation) ? 3.0 : 2.0) * width * static_cast<double>(m.ffn_hidden_size);
  const double layer = attended + keys + mlp;
  const double weights = read * (encoder * layer + decoder * keys) +
                         said * (decoder * (layer + attended) + static_cast<double>(m.vocab_size) * width);
  const double pairs = encoder * read * read + decoder * (said * said / 2 + said * read);
  return (6.0 * weights + 12.0 * heads * pairs) / said;
}

}  // namespace tessera
