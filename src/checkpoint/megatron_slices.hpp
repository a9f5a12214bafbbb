#pragma once
/// Tensor ranks' parts of whole tensors, as Megatron's files have them, and the optimizer's share of such a
/// file.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/torch_file.hpp"
#include "tessera/base/config_model.hpp"
#include "tessera/checkpoint/megatron.hpp"

namespace tessera::checkpoint_detail {

/// A tensor of one rank's file.
struct RankPart {
  std::string ours;               ///< of the whole model; "": none of it but `number`
  std::vector<std::string> path;  ///< keys below `model`
  Shape shape;                    ///< of the rank
  DType dtype;
  std::optional<RunValue> value;  ///< of the optimizer; nothing: the weight as the model has it
  float number = 0;               ///< a count of updates, the factor on the loss
};

struct RankCut {
  const ModelConfig& model;
  std::int64_t ranks, rank;
  std::int64_t padded_vocabulary;  ///< rows over all ranks
};
/// What the rank has of a tensor: boxes of the whole one, whose rows follow each other in the rank's but for
/// those of query, key and value, which go by group of heads. Rows that pad the vocabulary are in none.
std::vector<TensorSlice> rank_boxes(const RankCut& cut, const std::string& name, const Shape& whole);

/// Writes Adam's state of a rank, as the value of a key: Megatron's optimizer of 16-bit weights with fp32
/// copies, or that of fp32. Its tensors are added to `parts` in the order in which the pickle has them.
void write_run_optimizer(TorchPickle& pickle, const RunSource& run, const std::vector<RankPart>& parameters,
                         const MegatronExportOptions& options, std::vector<RankPart>& parts);

/// How Megatron's distributed optimizer calls its tensors in torch_dist that have the weights' shapes.
inline constexpr const char* kReshardable = "fully_reshardable";
/// Writes what an optimizer has beside its tensors where these lie elsewhere, as the value of a key: groups
/// without parameters, and the scaler, whose tensor is added to `parts`.
void write_optimizer_facts(TorchPickle& pickle, const RunSource& run, const MegatronExportOptions& options,
                           std::vector<RankPart>& parts);

}  // namespace tessera::checkpoint_detail
