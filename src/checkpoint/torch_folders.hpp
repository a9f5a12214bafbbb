#pragma once
/// Folders of weights that programs of PyTorch leave behind, as tensors in parts under the names they were
/// saved by.

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/parts_storage.hpp"
#include "tessera/checkpoint/run_source.hpp"

namespace tessera::checkpoint_detail {

/// PyTorch's distributed checkpoints: `.metadata` and what it points to. Blobs are passed over. Moments are
/// what is called `....state.NAME.exp_avg`. Errors: CheckpointError naming what is missing, damaged,
/// compressed or of a type that is not read; IoError.
std::vector<PartedTensor> dcp_tensors(const std::filesystem::path& dir, SymbolicLinks links,
                                      TorchFacts& facts, RunValue value = RunValue::weight);

/// Where something lies that is no tensor: a file of torch.save within another.
struct DcpPlace {
  std::filesystem::path file;
  std::uint64_t offset = 0, bytes = 0;
};
struct DcpContents {
  std::vector<PartedTensor> tensors;
  std::map<std::string, DcpPlace> blobs;  ///< by name
};
/// All that such a checkpoint holds, under its own names; flat tensors of Megatron Core's in their own shape.
/// Errors: as above.
DcpContents dcp_contents(const std::filesystem::path& dir, SymbolicLinks links);

/// A checkpoint of DeepSpeed on one tensor rank: fp32 weights of ZeRO-1, -2 and -3 from the optimizer's
/// partitions, those of the universal form, or the module's where nothing is partitioned. `dir`: the folder
/// with `latest`, or that of a tag. What was decided is said in `facts`. Errors: as above; ranks that are
/// missing, more tensor or pipeline ranks than one.
std::vector<PartedTensor> deepspeed_tensors(const std::filesystem::path& dir, SymbolicLinks links,
                                            TorchFacts& facts, RunValue value = RunValue::weight);

/// A state_dict in one file of torch.save; what is no tensor is passed over.
std::vector<PartedTensor> torch_file_tensors(const std::filesystem::path& file, SymbolicLinks links);

/// A folder of Accelerate's save_state, or a pytorch_model.bin: the model's weights, whole or in the parts of
/// FSDP or DeepSpeed.
std::unique_ptr<HfStorage> accelerate_storage(const std::filesystem::path& dir, const ModelSpec& spec,
                                              SymbolicLinks links, TorchFacts& facts);
/// Where the moments of such a folder lie: another folder, and its format. Errors: CheckpointError where they
/// have no names.
std::pair<TorchFormat, std::filesystem::path> accelerate_moments(const std::filesystem::path& dir);

/// "exp_avg", "exp_avg_sq"; "" of a weight.
const char* torch_name(RunValue value);

}  // namespace tessera::checkpoint_detail
