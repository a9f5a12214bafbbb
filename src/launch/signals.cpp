#include "launch/signals.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

constexpr int kWatched[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGPIPE};

bool ignored(int signal_number) {
  struct sigaction action {};
  sigaction(signal_number, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

struct GuardMessage {
  pid_t worker;
  int alive;
};

/// A guard that was killed cannot be told; the parent-death signal is left.
void tell(int pipe, const GuardMessage& message) {
  while (write(pipe, &message, sizeof message) < 0 && errno == EINTR) continue;
}

/// Reads which workers there are until the launcher is gone, then kills what is left of them. Runs after
/// fork() in a process that may have had threads: only async-signal-safe calls, no allocation.
[[noreturn]] void run_guard(int pipe, pid_t* workers, std::size_t room) {
  setsid();
  prctl(PR_SET_NAME, "tessera-guard");
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  // Who waits for the end of the launcher's output must not wait for the guard too.
  dup2(pipe, 0);
  close_range(1, ~0U, 0);
  std::size_t count = 0;
  GuardMessage message{};
  while (true) {
    const ssize_t got = read(0, &message, sizeof message);
    if (got < 0 && errno == EINTR) continue;
    if (got != static_cast<ssize_t>(sizeof message)) break;
    std::size_t at = 0;
    while (at < count && workers[at] != message.worker) ++at;
    if (message.alive != 0 && at == count && count < room) workers[count++] = message.worker;
    if (message.alive == 0 && at < count) workers[at] = workers[--count];
  }
  for (std::size_t i = 0; i < count; ++i) {
    kill(-workers[i], SIGKILL);
    kill(workers[i], SIGKILL);
  }
  _exit(0);
}

}  // namespace

std::string signal_text(int signal_number) {
  return detail::concat("signal ", signal_number, " (", strsignal(signal_number), ")");
}

SignalWatch::SignalWatch() {
  sigemptyset(&watched_);
  for (const int signal_number : kWatched) {
    if (signal_number == SIGCHLD || !ignored(signal_number)) sigaddset(&watched_, signal_number);
  }
  fd_ = signalfd(-1, &watched_, SFD_NONBLOCK | SFD_CLOEXEC);
  TESSERA_ENSURE(IoError, fd_ >= 0, "signalfd: ", std::strerror(errno));
  pthread_sigmask(SIG_BLOCK, &watched_, &old_mask_);
}

SignalWatch::~SignalWatch() {
  // What came too late to be passed on must not end this process afterwards.
  const timespec now{};
  while (sigtimedwait(&watched_, nullptr, &now) > 0) continue;
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  close(fd_);
}

std::optional<int> SignalWatch::next() {
  signalfd_siginfo info{};
  if (read(fd_, &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

Guard::Guard(std::size_t workers) {
  int ends[2] = {-1, -1};
  TESSERA_ENSURE(IoError, pipe2(ends, O_CLOEXEC) == 0, "pipe: ", std::strerror(errno));
  std::vector<pid_t> room(workers);
  pid_ = fork();
  if (pid_ == 0) run_guard(ends[0], room.data(), room.size());
  const int error = errno;
  close(ends[0]);
  pipe_ = ends[1];
  if (pid_ < 0) {
    close(pipe_);
    throw IoError(detail::concat("cannot start a process: ", std::strerror(error)));
  }
}

Guard::~Guard() {
  close(pipe_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) continue;
}

void Guard::add_self(int fd) { tell(fd, {getpid(), 1}); }

void Guard::remove(pid_t worker) { tell(pipe_, {worker, 0}); }

}  // namespace tessera::launching
