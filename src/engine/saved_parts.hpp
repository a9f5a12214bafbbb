#pragma once
/// What an engine's checkpoint is made of: tensors of this rank, and numbers of the run.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/moments.hpp"
#include "tessera/engine/state.hpp"

namespace tessera {

/// A file of this rank.
struct Shard {
  std::string file;
  std::vector<CheckpointTensor> tensors;
};

/// The optimizer's tensors, if it trains.
std::vector<StatePiece> optimizer_pieces(Engine& engine, PieceSet set, const StateParts& parts);
/// Pieces of the accumulated gradient, of parameters that have one.
std::vector<StatePiece> gradient_pieces(const ParamStore& store, PieceSet set);

/// What this rank saves: its main weights, and what belongs to the optimizer. Data ranks share the work, so
/// the weights are in a file of each where there are several.
std::vector<Shard> shards_of(Engine& engine, const StateParts& parts);
std::uint64_t bytes_of(const std::vector<Shard>& shards);

/// Rank 0's save, in which all bytes of all ranks have room; returns the folder that all write into.
/// Collective. Errors: IoError, on every rank.
std::string begin_save(const std::filesystem::path& root, Engine& engine, std::int64_t step,
                       const std::vector<Shard>& shards, const SaveOptions& options,
                       std::optional<CheckpointSave>& save);

/// The run's numbers as a checkpoint has them. Collective.
CheckpointState checkpoint_state(Engine& engine, const RunState& run, const StateParts& parts);

}  // namespace tessera
