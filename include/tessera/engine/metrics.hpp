#pragma once
/// The run's record: metrics.jsonl, one line a step.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/device/exec_ctx.hpp"

namespace tessera {

struct StepRecord {
  std::int64_t step = 0;  ///< from 1
  double loss = 0, grad_norm = 0, lr = 0;
  std::int64_t tokens = 0;  ///< since the start of the run
  double tokens_per_s = 0;
  std::optional<double> mfu = {};  ///< model FLOP/s over the devices' peak; on CPUs, the measured rate
  std::optional<double> mfu_of_measured = {};  ///< over the rate of matrix products measured at the start
  double step_ms = 0, data_ms = 0, forward_ms = 0, backward_ms = 0, update_ms = 0;
  /// Share of the step that rank 0 waited for collectives that nothing hid; waits for other stages are
  /// bubble.
  double communication_share = 0;
  std::int64_t peak_mem_bytes = 0;  ///< of the rank that held most
  std::int64_t skipped = 0;         ///< steps skipped so far because their gradient was not finite
  /// Models with extra losses only: the tokens' loss and each extra one, by name, before their weights.
  std::vector<std::pair<std::string, double>> losses = {};
  std::optional<double> loss_scale = {};  ///< fp16: of the next step
  std::optional<double> eval_loss = {};
  std::vector<std::pair<std::string, double>> eval_losses = {};  ///< of an evaluation, as `losses`
  /// Several ranks only: rank 0's waits for its pipeline neighbours, and what it sent and waited for on each
  /// axis.
  std::optional<double> bubble_ms = {};
  struct Traffic {
    std::string axis;
    std::int64_t bytes = 0;
    double wait_ms = 0;
  };
  std::vector<Traffic> traffic = {};
};

/// What a run found in its metrics.jsonl and did with it.
struct MetricsHistory {
  std::int64_t lines = 0;  ///< kept
  std::int64_t last = 0;   ///< last step the file had a line for
  std::string missing =
      "";  ///< "step 4" or "steps 2 to 3, 7": without a line, though the run goes on after them
  std::string damage = "";        ///< lines that cannot be read: "line 5 is cut off", ...
  std::string dropped = "";       ///< "steps 9 to 12": lines of steps that are trained again
  std::filesystem::path kept_as;  ///< where the old file went when the run starts over; empty if it did not
};

class MetricsFile {
 public:
  /// Appends to `path`. Lines of steps after `last_step` (written by a process that died after its last
  /// checkpoint), a step's second line and a half-written last line are dropped first. Where the run starts
  /// over (`last_step` 0), a file with lines is not touched but renamed to metrics.1.jsonl, or the next
  /// number that is free. A process killed meanwhile leaves the old file or the new one, whole and durable.
  /// Errors: IoError.
  MetricsFile(std::filesystem::path path, std::int64_t last_step);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;
  const MetricsHistory& history() const { return history_; }
  /// One line, flushed. Numbers that are not finite are written as null. Errors: IoError (disk full).
  void write(const StepRecord& record);
  /// The lines so far are on the disk when it returns. Errors: IoError.
  void sync();

 private:
  std::filesystem::path path_;
  MetricsHistory history_;
  int file_ = -1;
};

/// Most memory held so far, in bytes: of the context's GPU, or of this process (not of the one that started
/// it).
std::int64_t peak_memory_bytes(const ExecCtx& ctx);

}  // namespace tessera
