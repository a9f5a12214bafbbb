#pragma once
/// The launcher: starts the processes of a job on this machine, watches them, ends and restarts them. One
/// launcher per machine; the one of machine 0 serves the store through which all processes meet.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/exit_codes.hpp"
#include "tessera/base/log.hpp"

namespace tessera {

/// Exit code of a program that ended only because another rank was lost. The launcher then looks for the rank
/// that was lost first.
constexpr int kLostPeerExitCode = exit_code::kLostPeer;

struct LaunchOptions {
  /// The program, as find_command gives it, and its arguments.
  std::string program;
  std::vector<std::string> argv;
  /// "NAME=value": what every worker inherits. The launcher adds RANK, WORLD_SIZE and the rest.
  std::vector<std::string> environment;

  int num_processes = 1;  ///< of all machines together
  int num_machines = 1;   ///< divides num_processes
  int machine_rank = 0;
  /// Where the store is: an address of machine 0 that all machines reach. Port 0 takes a free one (one
  /// machine).
  std::string main_process_ip = "127.0.0.1";
  std::uint16_t main_process_port = 0;
  /// The job's secret; empty = a random one on one machine, none on several, which is warned about.
  std::string secret;

  /// After a failure everything is started again, so many times; not after three attempts in a row that came
  /// to nothing. Workers tell how far they come by ProgressReporter.
  int max_restarts = 0;
  double restart_delay_s = 1;           ///< before the first restart; doubled before each further one
  double longest_restart_delay_s = 60;  ///< at most that
  int threads_per_process =
      0;                   ///< 0 = this machine's cores shared out, unless the environment says otherwise
  bool pin_cores = false;  ///< each worker runs on its own share of this machine's cores only
  /// Folder for what each rank writes (rank-0.log, ...), byte for byte; empty = none.
  std::string log_dir;
  /// Only rank 0's output is passed on, as it comes and without a prefix. Otherwise every rank's lines are,
  /// each after "[rank N] ".
  bool quiet = false;
  /// Where the workers' output goes.
  int stdout_fd = 1;
  int stderr_fd = 2;

  /// A worker that was asked to end by SIGINT, SIGTERM or SIGHUP is killed after so long, and after its last
  /// save and its longest step.
  double grace_s = 15;
  /// What a save is taken to last, after SIGTERM, until a worker has told of one.
  double first_save_s = 0;
  double failure_grace_s = 3;   ///< the same after another worker failed
  double collect_s = 1.5;       ///< after a first failure, how long to wait for others that explain it
  double join_timeout_s = 300;  ///< several machines: until all launchers are there
  double lost_machine_s = 60;   ///< several machines: a launcher that is silent for so long is lost
};

struct LaunchResult {
  /// One of exit_code's: 0; that of the worker that failed first, 128 + signal when it was killed; kLostPeer,
  /// kNoAnswer where workers only waited for another; kPreempted; 128 + signal when the launcher was told to
  /// end and nothing was saved.
  int exit_code = 0;
  /// What happened, for the last lines on the terminal; empty after success.
  std::string report;
  /// Several machines: the launchers of all of them have this outcome.
  bool shared = false;
};

/// Runs the job to its end. SIGINT, SIGTERM and SIGHUP are passed on to the workers (a second one kills
/// them, but not a SIGTERM after another one), SIGUSR1 and SIGUSR2 too; for the time of the call they are
/// blocked in the calling thread, so call it from the main thread before others are started. Workers that end
/// with exit_code::kPreempted have saved: that is no failure, and nothing is started again. No worker
/// outlives this process, even one killed by SIGKILL. Errors: InvalidArgument for options that contradict
/// each other; IoError when a process, folder or port cannot be had; CommunicationError when the launchers of
/// the other machines do not come, or only some of them have a secret, or another one.
LaunchResult launch(const LaunchOptions& options, const Logger& log);

}  // namespace tessera
