#pragma once
/// The run's folder (logging.dir): which run it belongs to, and what to go on from.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/resume.hpp"
#include "engine/run_identity.hpp"
#include "tessera/base/log.hpp"
#include "tessera/engine/metrics.hpp"
#include "tessera/engine/run_lock.hpp"

namespace tessera {

struct Config;

struct RunFolderOptions {
  bool restarted = false;              ///< as in train()
  std::function<void()> on_wait = {};  ///< called while it watches whether another machine's job still runs
};

class RunFolder {
 public:
  /// Makes the folder and that of the checkpoints, and keeps both for this job as long as the object lives.
  /// Errors: IoError if that fails, ConfigError if another job works there, or if they hold another run's
  /// files and this one is not to resume them.
  RunFolder(const Config& config, const Logger& log, const RunFolderOptions& options = {});

  /// What to go on from by checkpoint.resume, the first choice first: all there are (auto), none, or a given
  /// one; a run that began from a given one and has checkpoints of its own goes on from these, and a
  /// restarted one in any case. Errors: CheckpointError when a given one cannot be used; ConfigError when the
  /// run would begin anew over its own checkpoints.
  std::vector<std::filesystem::path> checkpoints_to_try();

  /// What became of them: damaged ones that were passed over are told of. Errors: CheckpointError when there
  /// were some and none is whole.
  void settle(const WholeCheckpoint& found) const;

  /// Errors: ConfigError listing the keys in which `saved` describes other training (model, data order,
  /// precision).
  void check_same_run(const Config& saved, const std::filesystem::path& from) const;

  /// Writes the resolved configuration to config.yaml; on the disk when it returns.
  void write_config() const;

  /// metrics.jsonl of a run that goes on after `step`, of a checkpoint in `resumed` ("": none). What the file
  /// lacks, and what is dropped of it, is logged. Errors: IoError.
  std::unique_ptr<MetricsFile> open_metrics(std::int64_t step, const std::filesystem::path& resumed) const;

  /// The run's identity, for its checkpoints.
  const std::string& run() const { return identity_.id; }

  /// Before something is published: errors as RunLock::check_still_ours.
  void check_still_ours();
  /// The same by what was seen last, every 20 s: costs nothing.
  void refuse_if_seen_lost() const;

 private:
  std::optional<std::filesystem::path> given_checkpoint(const std::string& resume);
  bool is_own(const std::filesystem::path& checkpoint) const;

  const Config& config_;
  const Logger& log_;
  bool restarted_;
  std::filesystem::path root_;
  std::vector<RunLock> locks_;  // of the run's folder and of the checkpoints'
  RunIdentity identity_;
  std::optional<std::filesystem::path> given_;  // by checkpoint.resume, and not one of this run's
  mutable std::set<std::string> told_;          ///< changed keys: the folder and the checkpoint say the same
};

}  // namespace tessera
