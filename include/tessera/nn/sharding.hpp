#pragma once
/// What part of a model a rank holds.

#include <cstdint>
#include <vector>

#include "tessera/base/config_words.hpp"
#include "tessera/parallel/experts.hpp"
#include "tessera/parallel/functions.hpp"

namespace tessera {

struct ModelConfig;
struct TrainingConfig;

/// One piece of a model: neighbouring layers, and what stands before the first and after the last.
struct ModelPiece {
  std::int64_t first_layer = 0, num_layers = 0;
  bool embedding = false;  ///< begins with the token embedding
  bool head = false;       ///< ends with the final norm and the head
};

/// What is computed again in backward instead of kept.
struct RecomputeOptions {
  Recompute what = Recompute::none;
  RecomputeMethod method = RecomputeMethod::uniform;
  std::int64_t layers = 1;
  bool partition = false;

  /// Errors: InvalidArgument while training.recompute is auto: settle_recompute (engine) comes first.
  static RecomputeOptions from(const TrainingConfig& training);

  friend bool operator==(const RecomputeOptions&, const RecomputeOptions&) = default;
};

/// Attention heads of one tensor rank. Query heads are shared out; key-value heads too, or, where there are
/// fewer of them than ranks, neighbouring ranks hold the same one.
struct HeadShare {
  std::int64_t first = 0, heads = 0;        ///< query heads
  std::int64_t first_kv = 0, kv_heads = 0;  ///< key-value heads
  int copies = 1, copy = 0;  ///< ranks that hold these key-value heads, and which of them this is
};
/// Errors: ConfigError unless heads divide by the ranks, and key-value heads by the ranks or the ranks by
/// them.
HeadShare head_share(const ModelConfig& config, const TensorParallel& tensor);
/// Rows of linear_qkv (all q heads, all k heads, all v heads) that a rank holds.
std::vector<Segment> qkv_rows(const ModelConfig& config, const HeadShare& share);
/// Rows of the linear_fc1 of an MLP with `width` features: of the one matrix, or of gate and up each.
std::vector<Segment> fc1_rows(const ModelConfig& config, const TensorParallel& tensor, std::int64_t width);

/// How a rank takes part in a model. The default is one rank with all of it.
struct Sharding {
  TensorParallel tensor;
  ExpertParallel experts = {};
  std::vector<ModelPiece>
      pieces;  ///< of this rank, in the order the model runs; empty = all layers in one piece
  RecomputeOptions recompute;
};

}  // namespace tessera
