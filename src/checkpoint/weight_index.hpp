#pragma once
/// model.safetensors.index.json: which file holds which tensor.

#include <map>
#include <string>
#include <string_view>

namespace tessera::checkpoint_detail {

struct WeightIndex {
  std::map<std::string, std::string> files;  ///< tensor -> plain name of a file in the same folder
  std::string metadata;                      ///< its "metadata" object as JSON text; "" where there is none
};

/// `origin` names the text in messages. Errors: CheckpointError.
WeightIndex parse_weight_index(std::string_view text, const std::string& origin);

}  // namespace tessera::checkpoint_detail
