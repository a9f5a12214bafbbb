#include "tessera/nn/sharding.hpp"

#include "tessera/base/config.hpp"

namespace tessera {

RecomputeOptions RecomputeOptions::from(const TrainingConfig& training) {
  TESSERA_CHECK(training.recompute != Recompute::automatic,
                "training.recompute is still auto: settle_recompute says what it is on this device");
  return {training.recompute, training.recompute_method, training.recompute_layers,
          training.recompute_partition};
}

HeadShare head_share(const ModelConfig& config, const TensorParallel& tensor) {
  const std::int64_t heads = config.num_heads, kv = config.num_kv_heads, ranks = tensor.size(),
                     rank = tensor.rank();
  TESSERA_ENSURE(ConfigError, heads % ranks == 0, "model.num_heads (", heads,
                 ") does not divide by parallel.tensor (", ranks, ")");
  TESSERA_ENSURE(ConfigError, kv % ranks == 0 || ranks % kv == 0, "model.num_kv_heads (", kv,
                 ") does not divide by parallel.tensor (", ranks, "), nor the other way round");
  HeadShare share{.first = rank * (heads / ranks), .heads = heads / ranks};
  if (kv >= ranks) {
    share.kv_heads = kv / ranks;
    share.first_kv = rank * share.kv_heads;
  } else {
    share.copies = static_cast<int>(ranks / kv);
    share.copy = static_cast<int>(rank % share.copies);
    share.kv_heads = 1;
    share.first_kv = rank / share.copies;
  }
  return share;
}

std::vector<Segment> qkv_rows(const ModelConfig& config, const HeadShare& share) {
  const std::int64_t d = config.head_dim, heads = config.num_heads, kv = config.num_kv_heads;
  const std::int64_t q_rows = share.heads * d, kv_rows = share.kv_heads * d;
  return {{.local = 0, .global = share.first * d, .count = q_rows},
          {.local = q_rows,
           .global = (heads + share.first_kv) * d,
           .count = kv_rows,
           .copies = share.copies,
           .copy = share.copy},
          {.local = q_rows + kv_rows,
           .global = (heads + kv + share.first_kv) * d,
           .count = kv_rows,
           .copies = share.copies,
           .copy = share.copy}};
}

std::vector<Segment> fc1_rows(const ModelConfig& config, const TensorParallel& tensor, std::int64_t width) {
  TESSERA_ENSURE(ConfigError, width % tensor.size() == 0,
                 width == config.ffn_hidden_size ? "model.ffn_hidden_size (" : "model.moe_ffn_hidden_size (",
                 width, ") does not divide by parallel.tensor (", tensor.size(), ")");
  const Part part = part_of(width, tensor.rank(), tensor.size());
  std::vector<Segment> rows{{.local = 0, .global = part.begin, .count = part.count}};
  if (is_gated(config.activation))
    rows.push_back({.local = part.count, .global = width + part.begin, .count = part.count});
  return rows;
}

}  // namespace tessera
