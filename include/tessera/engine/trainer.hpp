#pragma once
/// A whole training run from a configuration: data, model, steps, evaluation, checkpoints, metrics.

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/log.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/engine/metrics.hpp"

namespace tessera {

struct Config;

struct RunInfo {
  std::int64_t parameters = 0, steps = 0, first_step = 0, tokens_per_step = 0, threads = 0, ranks = 1;
  std::optional<double> gemm_flops_per_s;  ///< measured rate of matrix products, of all ranks together
};

/// What the trainer tells its caller; every function may be empty.
struct TrainHooks {
  std::function<void(const RunInfo&)> on_start;
  std::function<void(const StepRecord&)> on_step;
  std::function<void(const StepRecord&)> on_evaluation;  ///< after on_step of the same record
  std::function<void(const std::filesystem::path&)> on_checkpoint;
  /// logging.profile: rank 0's table, after the last step that was recorded.
  std::function<void(const std::string& table)> on_profile;
  /// Asked after every step: true ends the run (after saving, if checkpoint.on_interrupt).
  std::function<bool()> should_stop;
  /// Asked after every step: true ends the run after saving, whatever checkpoint.on_interrupt says.
  std::function<bool()> should_preempt;
  /// On every rank: a step was made; training stood still so long for a checkpoint of that step.
  std::function<void(std::int64_t step)> on_progress;
  std::function<void(std::int64_t step, double seconds)> on_saved;
  /// Of the run's watchdog (watchdog.hpp): on every rank, from its thread.
  std::function<void(const std::string&message)> on_hang, on_dump;
  std::function<bool()> dump_asked;
};

struct TrainResult {
  std::int64_t step = 0;
  bool interrupted = false;
  bool preempted = false;  ///< also interrupted, by should_preempt
  std::optional<double> train_loss, eval_loss;
  std::optional<std::filesystem::path> checkpoint;  ///< the last one saved or resumed from
};

struct TrainOptions {
  /// The job was started again after a failure, so it goes on from its own newest checkpoint, whatever
  /// checkpoint.resume said to the first start.
  bool restarted = false;
  std::vector<std::string> gemm_tables = {};  ///< as for build_engine
};

/// Trains as `config` says, going on from the last whole checkpoint if there is one and
/// checkpoint.resume allows it. `world`: all ranks of the job, null = this one alone; every rank calls train
/// with the same configuration, rank 0 writes the run's folder and is the one whose hooks are told
/// (should_stop and should_preempt are asked on every rank: one that says yes stops all). A Watchdog with
/// parallel.timeout_s watches each rank; its dumps go to logging.dir/flight. Errors: ConfigError, DataError,
/// CheckpointError, IoError, TrainingError, CommunicationError; a rank that fails ends the others' waits.
TrainResult train(const Config& config, const TrainHooks& hooks, const Logger& log,
                  std::shared_ptr<Communicator> world = nullptr, const TrainOptions& options = {});

/// What `train` refuses about the run's folder before it makes anything: for who starts the processes.
/// Errors: ConfigError if the folder holds something that is no run, or checkpoints that
/// checkpoint.resume=none excludes (not when `restarted`), if a process of this machine works there, or if
/// the checkpoint folder is another run's.
void check_run_folder(const Config& config, bool restarted = false);

/// load_config for a run. The config.yaml in a run's folder stands for that folder, wherever it was copied or
/// moved to, unless an override gives logging.dir; a difference is logged.
Config load_run_config(const std::filesystem::path& path, const std::vector<std::string>& overrides,
                       const Logger& log);

/// Where a run keeps its checkpoints.
std::filesystem::path checkpoint_root(const Config& config);

}  // namespace tessera
