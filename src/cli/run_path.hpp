#pragma once
#include <filesystem>
#include <memory>

#include <optional>

#include "tessera/base/config.hpp"
#include "tessera/data/tokenizer_record.hpp"
#include "tessera/engine/engine.hpp"

namespace tessera::cli {

/// The checkpoint that `path` means: itself, the newest of a folder of checkpoints, or the newest of a run's
/// folder. Errors: CheckpointError if there is none.
std::filesystem::path checkpoint_in(const std::filesystem::path& path);

/// The folder of checkpoints of a run's folder; `path` itself if it is none.
std::filesystem::path checkpoint_folder(const std::filesystem::path& path);

/// A model for inference, and how its text is tokenized.
struct LoadedModel {
  Config config = Settings{};
  std::unique_ptr<Engine> engine;
  std::optional<TokenizerRecord> tokenizer;  ///< of what it was trained on, where its checkpoint says
};
struct LoadOptions {
  std::int64_t threads = 0;
  std::vector<std::string> gemm_tables = {};      ///< as for build_engine
  std::vector<std::string> overrides = {};        ///< section.key=value, such as a layout
  std::shared_ptr<Communicator> world = nullptr;  ///< as for build_engine
  std::int64_t device_index = 0;
};
/// From a run, a checkpoint, or a model folder, on one process or in the layout of the overrides, whatever
/// it was trained on. Errors: CheckpointError; ConfigError for overrides.
LoadedModel load_model(const std::filesystem::path& path, const LoadOptions& options);
/// The configuration it would be loaded with.
Config config_to_load(const std::filesystem::path& path, const LoadOptions& options);

}  // namespace tessera::cli
