#pragma once
/// The run's record: metrics.jsonl, one line a step.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/device/exec_ctx.hpp"

namespace tessera {

struct StepRecord {
  std::int64_t step = 0;  ///< from 1
  double loss = 0, grad_norm = 0, lr = 0;
  std::int64_t tokens = 0;  ///< since the start of the run
  double tokens_per_s = 0;
  std::optional<double> mfu = {};  ///< model FLOPs/s over the machine's measured GEMM rate
  double step_ms = 0, data_ms = 0, forward_ms = 0, backward_ms = 0, update_ms = 0;
  std::int64_t peak_mem_bytes = 0;        ///< of the rank that held most
  std::int64_t skipped = 0;               ///< steps skipped so far because their gradient was not finite
  std::optional<double> loss_scale = {};  ///< fp16: of the next step
  std::optional<double> eval_loss = {};
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

class MetricsFile {
 public:
  /// Appends to `path`. Lines of steps after `last_step` (written by a process that died after its last
  /// checkpoint) and a half-written last line are dropped first. Errors: IoError.
  MetricsFile(std::filesystem::path path, std::int64_t last_step);
  ~MetricsFile();
  /// One line, flushed. Numbers that are not finite are written as null. Errors: IoError (disk full).
  void write(const StepRecord& record);

 private:
  std::filesystem::path path_;
  int file_ = -1;
};

/// Most memory held so far, in bytes: of the context's GPU, or of this process.
std::int64_t peak_memory_bytes(const ExecCtx& ctx);

}  // namespace tessera
