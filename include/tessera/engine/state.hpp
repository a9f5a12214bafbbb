#pragma once
/// An engine's state in checkpoints, and weights from elsewhere.

#include <filesystem>
#include <string>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

/// What a run remembers besides tensors.
struct RunState {
  std::int64_t step = 0, consumed_samples = 0, tokens = 0, skipped = 0;
  Config config;
  std::string run = "";  ///< identity of the run (RunFolder); "" where there is none
};

/// What of an engine is saved or loaded besides its weights.
struct StateParts {
  bool optimizer = true;  ///< moments, numbers of updates, loss scale, the gradient accumulated so far
};

/// Saves weights (fp32), optimizer state and `run` as step-NNNNNNNN in `root`; returns the folder. Collective
/// over the engine's ranks: each writes what it owns, rank 0 the manifest when all have. Errors: IoError, on
/// every rank; what was saved before stays.
std::filesystem::path save_engine(const std::filesystem::path& root, Engine& engine, const RunState& run,
                                  const SaveOptions& options, const StateParts& parts = {});

/// The run's numbers and configuration, without any tensor. Errors: CheckpointError.
RunState read_run_state(const CheckpointReader& reader);

/// Puts weights, and if the engine trains, the optimizer's state into `engine`, whatever layout saved them:
/// each rank reads the byte ranges it holds. What `engine` had accumulated is dropped. Collective over data
/// ranks (ParamStore::gather_weights). Errors:
/// CheckpointError listing every tensor that is missing or has another shape.
void load_engine(const CheckpointReader& reader, Engine& engine, const StateParts& parts = {});

}  // namespace tessera
