#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/machines.hpp"
#include "launch/signals.hpp"
#include "launch/worker.hpp"

struct pollfd;

namespace tessera::launching {

/// What the supervisor of a job works with.
struct Job {
  const LaunchOptions& options;
  const Logger& log;
  std::string host;
  std::string secret;
  std::string store_address;  ///< host:port
  SignalWatch& signals;
  Guard& guard;
  Machines* machines = nullptr;  ///< null: one machine
};

/// Watches the workers of this machine: one loop that waits for output, signals, ends and other machines.
class Supervisor {
 public:
  explicit Supervisor(const Job& job);

  /// Several machines: until all launchers are there. nullopt: they are; otherwise how the job ends.
  std::optional<Outcome> wait_for_machines();
  /// Runs all workers once. The outcome is that of the whole job. Errors: IoError.
  Outcome run(int attempt);
  /// Sleeps between two attempts. nullopt: the time is over; otherwise how the job ends.
  /// Errors: CommunicationError.
  std::optional<Outcome> pause(double seconds);
  /// Whether a signal asked for the end of the job: then nothing is started again.
  bool interrupted() const { return interrupted_ != 0 || preempted_ != 0; }
  /// Whether the last outcome is one that all machines have agreed on.
  bool agreed() const { return news_.verdict.has_value(); }
  /// Passes on what is still to be written.
  void flush();

 private:
  enum class Phase {
    running,
    collecting,  ///< one failed: others may explain it
    ending,      ///< all were told to end
    killing
  };

  int local_size() const { return job_.options.num_processes / job_.options.num_machines; }
  void start_workers(int attempt);
  WorkerSpec spec_of(int local_rank, int attempt) const;
  Worker::Sink sink_of(int rank);
  void wait();
  void handle_signals();
  void handle_signal(int signal_number);
  void preempt(int signal_number);
  double grace() const;
  void handle_news();
  void handle_ends();
  void fail();
  void advance();
  void enter(Phase phase, double seconds);
  void end_all(int signal_number);
  bool any_running() const;
  Outcome local_outcome() const;

  Job job_;
  Outlet out_, error_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Clock::time_point begin_;
  std::int64_t begin_ms_ = 0;
  Phase phase_ = Phase::running;
  Clock::time_point next_;  ///< when the phase ends, unless running
  int interrupted_ = 0;     ///< the first signal that asked for the end
  int preempted_ = 0;       ///< the last that asked the workers to save and end
  News news_;
};

}  // namespace tessera::launching
