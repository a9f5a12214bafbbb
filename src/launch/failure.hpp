#pragma once
/// Which worker failed first, and how to say so.

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launch/progress.hpp"
#include "tessera/base/exit_codes.hpp"

namespace tessera::launching {

/// How a worker ended.
struct WorkerEnd {
  int rank = 0;
  pid_t pid = -1;
  int exit_code = 0;
  int signal = 0;        ///< that killed it; 0 = it exited
  bool told = false;     ///< the launcher had told it to end before
  int asked = 0;         ///< SIGTERM or SIGUSR1 that was passed on to it: it may save first; 0 = none
  bool stopped = false;  ///< it was stopped (SIGSTOP) when it was told to
  double at_s = 0;       ///< seconds since the attempt began
  Progress progress;
  std::vector<std::string> last_lines;

  /// It saved and ended because it was asked to, by whomever.
  bool preempted() const { return signal == 0 && exit_code == exit_code::kPreempted; }
  /// It ended by the signal that was passed on, without having saved.
  bool ended_as_asked() const {
    return asked != 0 && (signal == asked || exit_code == exit_code::kSignal + asked);
  }
  bool failed() const { return !preempted() && (signal != 0 || exit_code != 0); }
  /// As shells have it: the exit code, or 128 + signal.
  int code() const { return signal != 0 ? 128 + signal : exit_code; }
};

/// Whether a failed worker only says that it lost others: by its exit code or its last words.
bool lost_peer(const WorkerEnd& end);

/// The failure that explains the others: a worker killed by a signal, else one with an error of its own, else
/// one that was stopped, else the first that lost its peers. nullopt if none failed.
std::optional<std::size_t> first_cause(std::span<const WorkerEnd> ends);

/// "rank 2 (host a, pid 17) was killed by signal 9 (Killed)".
std::string describe(const WorkerEnd& end, const std::string& host);

/// The whole report: the cause, its last lines, what became of the others.
std::string report_failure(std::span<const WorkerEnd> ends, const std::string& host);

/// The result of one attempt on one machine, as launchers tell each other.
struct Outcome {
  enum class Kind { done, failed, interrupted, lost, preempted };
  Kind kind = Kind::done;
  int code = 0;
  int weight = 0;          ///< of failures: the greatest is the job's cause
  std::int64_t at_ms = 0;  ///< system time of the failure
  std::string report;
  Progress progress;  ///< the furthest; of several machines only what restarts depend on

  std::string encode() const;
  /// Errors: CommunicationError if the text is none.
  static Outcome decode(const std::string& text);
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

/// The outcome of this machine's workers.
Outcome outcome_of(std::span<const WorkerEnd> ends, const std::string& host, std::int64_t start_ms);

/// The outcome of the job: an interruption, else a lost machine that nothing explains, else the weightiest
/// failure, the earliest of equals, else a preemption.
Outcome combine(std::span<const Outcome> outcomes);

}  // namespace tessera::launching
