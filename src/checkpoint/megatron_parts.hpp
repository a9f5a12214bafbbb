#pragma once
/// Whole tensors from the parts that tensor ranks have of them, whichever of a parameter's values they are.

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/megatron_names.hpp"
#include "checkpoint/torch_file.hpp"

namespace tessera::checkpoint_detail {

/// A tensor of the whole model by tensor rank.
struct StoredTensor {
  std::vector<std::pair<const TensorHolder*, TorchTensor>> ranks;
  Shape shape;                         ///< of the whole
  const StoredTensor* copy = nullptr;  ///< that is to hold the same

  DType dtype() const { return ranks.front().second.dtype; }
};

/// One value (weights, or one of the optimizer's) of all parameters.
struct StoredSet {
  std::map<std::string, StoredTensor> tensors;  ///< by Tessera's names
  /// What is there twice, by the same names: of a tied model with several stages the embedding.
  std::map<std::string, StoredTensor> copies;
};

/// How a checkpoint orders rows.
struct StoredOrder {
  const ModelConfig* model;
  std::int64_t version;  ///< checkpoint_version: of rows of query, key and value
};
/// Reads a whole tensor in Tessera's order. Errors: CheckpointError where ranks hold different values of what
/// they share; IoError.
void read_stored(const StoredTensor& from, const std::string& name, const StoredOrder& order,
                 std::span<std::byte> out);
/// The same of `count` rows from `first` on.
void read_stored_rows(const StoredTensor& from, const std::string& name, const StoredOrder& order,
                      std::int64_t first, std::int64_t count, std::span<std::byte> out);

}  // namespace tessera::checkpoint_detail
