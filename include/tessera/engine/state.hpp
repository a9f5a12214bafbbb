#pragma once
/// An engine's state in checkpoints, and weights from elsewhere.

#include <filesystem>
#include <optional>
#include <string>

#include "tessera/base/config.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/data/tokenizer_record.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera {

/// What a run remembers besides tensors.
struct RunState {
  std::int64_t step = 0, consumed_samples = 0, tokens = 0, skipped = 0;
  Config config = Settings{};
  std::string run = "";  ///< identity of the run (RunFolder); "" where there is none
  /// What made the ids that were trained on; none where nothing says.
  std::optional<TokenizerRecord> tokenizer = {};
  std::optional<std::uint64_t> seed =
      {};  ///< of the engine that was saved: read, and written from the engine
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

/// Checks every byte of a checkpoint, all ranks together: each byte once, by a rank that wrote it where the
/// layout is the one that saved. Returns one line per problem, the same on every rank; a rank at work renews
/// the others' deadlines. Collective.
std::vector<std::string> verify_together(const std::filesystem::path& dir, Communicator& world);

/// Reads and checks all that load_engine() would, and changes nothing. Returns what is damaged, on every
/// rank;
/// "" if nothing is. Collective. Errors: CheckpointError, as load_engine's.
std::string check_engine(const CheckpointReader& reader, Engine& engine, const StateParts& parts = {});

/// Puts weights, and if the engine trains, the optimizer's state into `engine`, whatever layout saved them:
/// each rank reads the byte ranges it holds. What `engine` had accumulated is dropped. Collective over the
/// engine's ranks; an error of one of them is a CommunicationError with its text on the others. Errors:
/// CheckpointError listing every tensor that is missing or has another shape, before anything is changed.
void load_engine(const CheckpointReader& reader, Engine& engine, const StateParts& parts = {});

/// The same from the checkpoint in `dir`, with the run's progress and the seed of its dropout, which a run
/// without a seed of its own would not know otherwise; an error of opening it alike.
RunState resume_engine(const std::filesystem::path& dir, Engine& engine, const StateParts& parts = {});

}  // namespace tessera
