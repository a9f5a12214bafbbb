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

std::uint64_t total_bytes(std::span<const TensorSpec> tensors);

HfPlan plan_names(const Architecture& config, const HfSource* source, const std::vector<TensorSpec>& specs,
                  std::optional<DType> dtype);

/// The config.json: the original text where it still describes the model, else the same with what changed.
std::string config_text(const Architecture& config, const ExportOptions& options, DType dtype);

using HfAppend = std::function<void(std::span<const std::byte>)>;

/// Boxes of tensors in the dtype they are to be stored in; the buffers are used again for the next one.
class WeightStage {
 public:
  explicit WeightStage(const WeightSource& weights) : weights_(weights) {}
  void read(const TensorSpec& spec, const TensorSlice& box, DType dtype, std::span<std::byte> out);
  /// The same in blocks of rows, so small that what was read is still in the cache when it is written, each
  /// read while the one before is handed over. Of a source that only has whole tensors the last one is kept.
  void hand_over(const TensorSpec& spec, const TensorSlice& box, DType dtype, const HfAppend& append);

 private:
  void fetch(const TensorSpec& spec, const TensorSlice& box, std::span<std::byte> out);

  const WeightSource& weights_;
  std::vector<std::byte> raw_, block_, next_block_, whole_;
  std::string held_;  // the tensor that whole_ has
};

/// Calls `write` for each tensor of the plan with a function that hands its bytes over, in as many pieces as
/// it likes. No more than one of Hugging Face's tensors is in memory at a time, and one parameter where the
/// weights only have whole ones.
void write_tensors(
    const HfPlan& plan, const std::vector<TensorSpec>& specs, const WeightSource& weights,
    const std::function<void(const TensorSpec&, const std::function<void(const HfAppend&)>&)>& write);

}  // namespace tessera::checkpoint_detail
