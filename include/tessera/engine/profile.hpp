#pragma once
/// What becomes of a Trace: a timeline for Perfetto, and a table of where the time of a step went.

#include <span>
#include <string>
#include <vector>

#include "tessera/device/trace.hpp"

namespace tessera {

/// A training step on the clock of a Trace. Steps do not overlap.
struct TimedStep {
  std::int64_t step = 0;
  double begin_s = 0, end_s = 0;
};

/// What this device does at best, as measured.
struct DeviceRates {
  double flops_per_s = 0;  ///< matrix products
  double bytes_per_s = 0;  ///< a large copy, read and written bytes together
};

/// Sums over steps. Each moment counts once: for the innermost work that is under way.
struct StepTable {
  struct Row {
    std::string name;
    std::int64_t calls = 0;
    double seconds = 0;
    double floor_s = 0;  ///< of the calls: max(flops / rate, bytes / rate) each; 0 = nothing to compute
  };
  std::vector<Row> kinds = {};       ///< in the order of WorkKind, then what is left: "host, idle"
  std::vector<Row> operations = {};  ///< by name, longest first
  double seconds = 0;                ///< of all steps; the sum of `kinds`
  int steps = 0;
};

/// `lane`: the rank's own work, the first of Trace::lanes. It counts as far as it lies in one of the steps.
StepTable make_step_table(const TraceLane& lane, std::span<const TimedStep> steps, const DeviceRates& rates);

/// The table as text, per step.
std::string text_of(const StepTable& table);

/// The timeline in the trace-event format (JSON): one process, the rank; one thread per lane; times from
/// `origin_s`.
std::string trace_json(const std::vector<TraceLane>& lanes, std::span<const TimedStep> steps, int rank,
                       double origin_s);

}  // namespace tessera
