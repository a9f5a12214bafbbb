#pragma once
/// What a folder of a model under Hugging Face's names is to contain, and its tensors one after the other.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {

struct HfPlan {
  std::vector<HfMapping> mappings;  ///< as many as parameters, in the same order
  std::vector<std::string> embedding_copies;
  std::vector<TensorSpec> tensors;  ///< the mappings' parts, then the copies
};

/// The weights' specs in model order. Errors: InvalidArgument where they do not fit the configuration.
std::vector<TensorSpec> checked_specs(const Architecture& config, const WeightSource& weights);

HfPlan plan_names(const Architecture& config, const HfSource* source, const std::vector<TensorSpec>& specs,
                  std::optional<DType> dtype);

/// The config.json: the original text where it still describes the model, else the same with what changed.
std::string config_text(const Architecture& config, const ExportOptions& options, DType dtype);

/// Reads a tensor and hands it over in the dtype it is to be stored in; the buffers are used again for the
/// next one.
class WeightStage {
 public:
  explicit WeightStage(const WeightSource& weights) : weights_(weights) {}
  std::span<const std::byte> read(const TensorSpec& spec, DType dtype);

 private:
  const WeightSource& weights_;
  std::vector<std::byte> raw_, converted_;
};

using HfAppend = std::function<void(std::span<const std::byte>)>;
/// Calls `write` for each tensor of the plan with a function that hands its bytes over, in as many pieces as
/// it likes. One parameter is in memory at a time.
void write_tensors(
    const HfPlan& plan, const std::vector<TensorSpec>& specs, const WeightSource& weights,
    const std::function<void(const TensorSpec&, const std::function<void(const HfAppend&)>&)>& write);

}  // namespace tessera::checkpoint_detail
