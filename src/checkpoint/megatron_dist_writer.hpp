#pragma once
/// Megatron's format torch_dist, written: one checkpoint for all layouts.

#include <filesystem>

#include "checkpoint/megatron_rank_parts.hpp"

namespace tessera::checkpoint_detail {

/// The layout of one rank that has all, with the vocabulary's padding of the layout that `options` name.
MegatronExportOptions undivided(const MegatronExportOptions& options);
/// Of all tensors of the checkpoint; `parts`: of that one rank.
std::uint64_t megatron_dist_bytes(const RankParts& parts, const MegatronExportOptions& options);
/// Writes the files of an iteration into `folder`, which is there. `options`: of the layout that the
/// arguments are to name. Errors: IoError.
void write_megatron_dist(const std::filesystem::path& folder, RankParts& parts,
                         const MegatronExportOptions& options);

}  // namespace tessera::checkpoint_detail
