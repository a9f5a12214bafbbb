#pragma once
/// A whole training run from a configuration: data, model, steps, evaluation, checkpoints, metrics.

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "tessera/base/config.hpp"
#include "tessera/base/log.hpp"
#include "tessera/engine/metrics.hpp"

namespace tessera {

struct RunInfo {
  std::int64_t parameters = 0, steps = 0, first_step = 0, tokens_per_step = 0, threads = 0;
  std::optional<double> gemm_flops_per_s;  ///< the machine's measured rate: what MFU is relative to
};

/// What the trainer tells its caller; every function may be empty.
struct TrainHooks {
  std::function<void(const RunInfo&)> on_start;
  std::function<void(const StepRecord&)> on_step;
  std::function<void(std::int64_t step, double loss)> on_evaluation;
  std::function<void(const std::filesystem::path&)> on_checkpoint;
  /// Asked after every step: true ends the run (after saving, if checkpoint.on_interrupt).
  std::function<bool()> should_stop;
};

struct TrainResult {
  std::int64_t step = 0;
  bool interrupted = false;
  std::optional<double> train_loss, eval_loss;
  std::optional<std::filesystem::path> checkpoint;  ///< the last one saved or resumed from
};

/// Trains as `config` (resolved) says, going on from the last whole checkpoint if there is one and
/// checkpoint.resume allows it. Errors: ConfigError, DataError, CheckpointError, IoError, TrainingError.
TrainResult train(const Config& config, const TrainHooks& hooks, const Logger& log);

/// Where a run keeps its checkpoints.
std::filesystem::path checkpoint_root(const Config& config);

}  // namespace tessera
