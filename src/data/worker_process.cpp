#include "data/worker_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "data/file.hpp"

extern char** environ;  // NOLINT: handed on to the child unread

namespace tessera {
namespace {

constexpr std::uint64_t kLongestFrame = std::uint64_t{1} << 32;
constexpr std::uint64_t kFirstPiece = std::uint64_t{1} << 16;

/// The last lines of what the child wrote to its standard error.
std::string tail_of(int fd) {
  constexpr off_t kTail = 2000;
  const off_t size = ::lseek(fd, 0, SEEK_END);
  std::string text(static_cast<std::size_t>(std::clamp<off_t>(size, 0, kTail)), '\0');
  const auto got = ::pread(fd, text.data(), text.size(), std::max<off_t>(0, size - kTail));
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, got)));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace

WorkerProcess::WorkerProcess(const std::vector<std::string>& command, double timeout_s, std::string remedy)
    : name_(command.front()), remedy_(std::move(remedy)), timeout_s_(timeout_s) {
  int ends[2] = {-1, -1};
  TESSERA_ENSURE(IoError, ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0,
                 "socketpair: ", files::reason(errno));
  messages_ = ::memfd_create("worker-stderr", MFD_CLOEXEC);
  socket_ = ends[0];
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  if (messages_ >= 0) ::posix_spawn_file_actions_adddup2(&actions, messages_, STDERR_FILENO);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int error = ::posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (error == 0) return;
  ::close(socket_);
  if (messages_ >= 0) ::close(messages_);
  throw ConfigError(detail::concat(name_, ": cannot be started: ", files::reason(error), ". ", remedy_));
}

WorkerProcess::~WorkerProcess() {
  ::close(socket_);
  // At the end of its input it ends by itself; one that hangs must not keep us.
  for (int turn = 0; pid_ > 0 && turn < 400; ++turn) {
    if (::waitpid(pid_, nullptr, WNOHANG) != 0) pid_ = -1;
    if (pid_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (messages_ >= 0) ::close(messages_);
}

void WorkerProcess::lost(const std::string& what) {
  std::string how;
  int status = 0;
  for (int turn = 0; pid_ > 0 && turn < 100 && how.empty(); ++turn) {
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      how = WIFSIGNALED(status) ? detail::concat(" It was ended by signal ", WTERMSIG(status), ".")
                                : detail::concat(" It ended with exit code ", WEXITSTATUS(status), ".");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  const std::string said = messages_ >= 0 ? tail_of(messages_) : "";
  throw IoError(
      detail::concat(name_, ": ", what, ".", how, said.empty() ? "" : " It said:\n", said, "\n", remedy_));
}

void WorkerProcess::transfer(std::byte* data, std::size_t size, bool sending) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s_);
  for (std::size_t done = 0; done < size;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) lost(detail::concat("the worker gave no answer within ", timeout_s_, " s"));
    pollfd waiting{socket_, static_cast<short>(sending ? POLLOUT : POLLIN), 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(std::min<std::int64_t>(left, 60'000)));
    if (ready <= 0) continue;  // a slice of the deadline passed, or a signal came
    const auto moved = sending ? ::send(socket_, data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT)
                               : ::recv(socket_, data + done, size - done, MSG_DONTWAIT);
    if (moved < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (moved <= 0) lost("the worker process ended");
    done += static_cast<std::size_t>(moved);
  }
}

void WorkerProcess::send(std::uint32_t kind, std::span<const std::byte> payload) {
  std::byte header[12];
  const std::uint64_t length = payload.size();
  std::memcpy(header, &kind, 4);
  std::memcpy(header + 4, &length, 8);
  transfer(header, sizeof header, true);
  transfer(const_cast<std::byte*>(payload.data()), payload.size(), true);
}

bool read_frame(const std::function<void(std::span<std::byte>)>& take, Frame& frame) {
  std::byte header[12];
  take(header);
  std::uint64_t length = 0;
  std::memcpy(&frame.kind, header, 4);
  std::memcpy(&length, header + 4, 8);
  if (length > kLongestFrame) return false;
  frame.payload.clear();
  while (frame.payload.size() < length) {
    const std::size_t done = frame.payload.size();
    const std::uint64_t piece = std::max<std::uint64_t>(kFirstPiece, done);
    frame.payload.resize(done + static_cast<std::size_t>(std::min(piece, length - done)));
    take(std::span(frame.payload).subspan(done));
  }
  return true;
}

Frame WorkerProcess::receive() {
  Frame frame;
  const auto take = [this](std::span<std::byte> out) { transfer(out.data(), out.size(), false); };
  if (!read_frame(take, frame)) lost("the worker's answer is not in the agreed form");
  return frame;
}

}  // namespace tessera
