#pragma once
/// The run's folder (logging.dir): which run it belongs to, and what to go on from.

#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "tessera/base/config.hpp"
#include "tessera/base/log.hpp"

namespace tessera {

class RunFolder {
 public:
  /// Makes the folder. Errors: IoError if that fails, ConfigError if it holds another run's files and this
  /// one is not to resume them.
  RunFolder(const Config& config, const Logger& log);

  /// By checkpoint.resume: the newest whole checkpoint (auto), none, or a given one. Damaged ones are
  /// reported and passed over. Errors: CheckpointError when a given one, or every one there is, cannot be
  /// used.
  std::optional<std::filesystem::path> checkpoint_to_resume() const;

  /// Errors: ConfigError listing the keys in which `saved` describes other training (model, data order,
  /// precision).
  void check_same_run(const Config& saved, const std::filesystem::path& from) const;

  /// Writes the resolved configuration to config.yaml.
  void write_config() const;

 private:
  const Config& config_;
  const Logger& log_;
  mutable std::set<std::string> told_;  ///< changed keys: the folder and the checkpoint say the same
};

}  // namespace tessera
