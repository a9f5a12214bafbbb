#pragma once
/// logging.profile: records some steps of a run and writes what was seen into the run's folder.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/engine/engine.hpp"
#include "tessera/engine/profile.hpp"

namespace tessera {

struct Config;

class Profiler {
 public:
  /// Measures what the device can do: not while steps are under way. `world` is kept by reference, `engine`
  /// too.
  Profiler(const Config& config, Engine& engine, Communicator& world, double flops_per_s);

  /// Whether step `step` must be over before the next one begins, so that recording starts and ends between
  /// steps.
  bool is_edge(std::int64_t step) const { return step + 1 == first_ || step + 1 == stop_; }
  /// Before each step: begins to record if it is one to record. Collective.
  void before_step(std::int64_t step);
  /// A step that is over; seconds of the clock of a Trace.
  void add_step(const TimedStep& step);
  /// Between steps: when `step` was the last one to record, or the run `ends`, writes
  /// profile/trace_rankN.json and, on rank 0, profile/steps.txt, and returns this rank's table. Collective.
  /// Errors: IoError.
  std::optional<std::string> after_step(std::int64_t step, bool ends);

 private:
  std::string report() const;
  std::string title(const StepTable& table) const;

  std::string folder_;
  std::int64_t first_, stop_;
  Engine& engine_;
  Communicator& world_;
  ExecCtx host_ = ExecCtx::cpu(1);
  DeviceRates rates_;
  std::shared_ptr<Trace> trace_;  ///< while steps are recorded
  double origin_s_ = 0;
  std::vector<TimedStep> steps_;
};

}  // namespace tessera
