#pragma once
/// Megatron's format torch_dist, written: one checkpoint for all layouts.

#include <filesystem>

#include "tessera/checkpoint/megatron.hpp"

namespace tessera::checkpoint_detail {

/// Writes the files of an iteration into `folder`, which is there. `run`: what goes along with the weights;
/// null: nothing. Errors: InvalidArgument where the weights are not the model's; IoError.
void write_megatron_dist(const std::filesystem::path& folder, const Architecture& config,
                         const WeightSource& weights, const MegatronExportOptions& options,
                         const RunSource* run);

}  // namespace tessera::checkpoint_detail
