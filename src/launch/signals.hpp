#pragma once
#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>

namespace tessera::launching {

/// "signal 9 (Killed)".
std::string signal_text(int signal_number);

/// Turns signals into something to poll for: while it lives they are blocked in this thread and can be read
/// here. Signals that this process ignores (nohup, background jobs of scripts) stay ignored.
class SignalWatch {
 public:
  /// Errors: IoError.
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// Readable when a signal is there.
  int fd() const { return fd_; }
  /// The next signal that came; nullopt if there is none.
  std::optional<int> next();
  /// What the thread's mask was, for children.
  const sigset_t& old_mask() const { return old_mask_; }

 private:
  sigset_t watched_{}, old_mask_{};
  int fd_ = -1;
};

/// A process of its own that kills the workers' process groups when this process is gone, however it ended:
/// the kernel's parent-death signal reaches only direct children.
class Guard {
 public:
  /// Room for so many workers at a time. Errors: IoError.
  explicit Guard(std::size_t workers);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// A worker names itself, before it can have children: for the child between fork() and exec, with fd().
  static void add_self(int fd);
  int fd() const { return pipe_; }
  /// A worker was reaped.
  void remove(pid_t worker);

 private:
  pid_t pid_ = -1;
  int pipe_ = -1;
};

}  // namespace tessera::launching
