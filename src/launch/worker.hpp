#pragma once
#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/failure.hpp"
#include "launch/lines.hpp"
#include "launch/progress.hpp"

namespace tessera::launching {

using Clock = std::chrono::steady_clock;

/// What it takes to start one worker.
struct WorkerSpec {
  int rank = 0;
  std::string program;
  std::vector<std::string> argv, environment;
  sigset_t signal_mask{};   ///< for the worker
  int guard = -1;           ///< Guard::fd()
  std::string log_file;     ///< what it writes is appended there; empty = nowhere
  std::string log_heading;  ///< a line before that
  std::vector<int> cores;   ///< it runs on these only; empty = on all
  int input = -1;           ///< what it reads from; -1 = it has no input
};

/// One child process: a session of its own, its output in two pipes. It dies with this process.
class Worker {
 public:
  /// Where its output goes besides the log: whole lines, or bytes as they come.
  struct Sink {
    std::function<void(bool error, std::string_view bytes)> bytes;
    std::function<void(bool error, std::string_view line)> line;
  };

  /// Errors: IoError.
  Worker(const WorkerSpec& spec, Sink sink, Clock::time_point epoch);
  /// Kills it if it is still there.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  int rank() const { return end_.rank; }
  pid_t pid() const { return end_.pid; }
  bool running() const { return running_; }
  const WorkerEnd& end() const { return end_; }

  /// Pipes to read from; -1 = closed.
  int output() const { return pipes_[0].fd; }
  int error() const { return pipes_[1].fd; }
  /// Where it tells how far it has come; -1 = closed.
  int progress() const { return progress_; }
  /// Reads what is there from one of them, a piece at most.
  void read_from(int fd);

  /// Whether it has ended by now. Then what it left behind in its process group is killed, its last words are
  /// read and the process is reaped. Returns true once.
  bool reap();

  /// Sends a signal to its process group, or to it alone.
  void signal(int signal_number, bool group);
  /// The same, and what happens to it from now on is the launcher's doing.
  void tell_to_end(int signal_number);
  /// Passes on a signal by which it is asked to save and end; to it alone, as its helpers must work till
  /// then.
  void ask_to_end(int signal_number);
  /// Whether it is stopped (SIGSTOP, a debugger).
  bool is_stopped() const;

 private:
  struct Pipe {
    int fd = -1;
    LineCutter lines;
  };

  bool read_piece(Pipe& pipe);
  void take(Pipe& pipe, std::string_view bytes);
  void drain(Pipe& pipe);
  void finish(Pipe& pipe);
  void read_progress();

  Sink sink_;
  Clock::time_point epoch_;
  WorkerEnd end_;
  Tail tail_;
  Pipe pipes_[2];
  int log_ = -1, progress_ = -1;
  ProgressReader reader_;
  bool running_ = false;
};

}  // namespace tessera::launching
