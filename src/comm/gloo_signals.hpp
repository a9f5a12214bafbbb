#pragma once
/// Gloo writes to sockets in a way that raises SIGPIPE when the other end is gone, which would end the
/// process. The program's own signal handling stays untouched: the signal is blocked where Gloo writes.

#include <pthread.h>

#include <csignal>
#include <ctime>

namespace tessera {

/// Threads started during its life get no signals at all: those are for the program's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

/// For a call into Gloo on a thread that is not ours: a SIGPIPE it raised is taken back.
class PipeSignalBlocked {
 public:
  PipeSignalBlocked() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
    was_blocked_ = sigismember(&before_, SIGPIPE) == 1;
    was_pending_ = !was_blocked_ && is_pending();
  }
  ~PipeSignalBlocked() {
    if (was_blocked_) return;
    if (!was_pending_ && is_pending()) {
      const timespec now{};
      sigtimedwait(&pipe_, nullptr, &now);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  PipeSignalBlocked(const PipeSignalBlocked&) = delete;
  PipeSignalBlocked& operator=(const PipeSignalBlocked&) = delete;

 private:
  static bool is_pending() {
    sigset_t pending;
    sigpending(&pending);
    return sigismember(&pending, SIGPIPE) == 1;
  }

  sigset_t pipe_, before_;
  bool was_blocked_ = false, was_pending_ = false;
};

}  // namespace tessera
