#include "launch/worker.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "launch/environment.hpp"
#include "launch/signals.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

constexpr std::size_t kTailLines = 20;

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> list;
  for (const std::string& word : words) list.push_back(const_cast<char*>(word.c_str()));
  list.push_back(nullptr);
  return list;
}

/// Everything the child needs, made before fork().
struct Start {
  const char* program;
  char* const* argv;
  char* const* environment;
  const sigset_t* mask;
  pid_t parent;
  int input, output, error, guard, progress;
  const cpu_set_t* cores;  ///< nullptr = all
};

/// The child, up to exec: only async-signal-safe calls.
[[noreturn]] void run_child(const Start& start) {
  setsid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // It may have died before the line above.
  if (getppid() != start.parent) _exit(127);
  Guard::add_self(start.guard);
  dup2(start.input, STDIN_FILENO);
  dup2(start.output, STDOUT_FILENO);
  dup2(start.error, STDERR_FILENO);
  fcntl(start.progress, F_SETFD, 0);
  if (start.cores != nullptr) sched_setaffinity(0, sizeof *start.cores, start.cores);
  ::signal(SIGPIPE, SIG_DFL);
  sigprocmask(SIG_SETMASK, start.mask, nullptr);
  execve(start.program, start.argv, start.environment);
  const int code = errno;
  const char* const reason =
      code == ENOEXEC ? "not a program (a script without a #! line?)" : strerrordesc_np(code);
  for (const char* part :
       {"cannot execute ", start.program, ": ", reason != nullptr ? reason : "unknown error", "\n"}) {
    if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
  }
  _exit(code == ENOENT ? 127 : 126);
}

void write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t done = write(fd, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return;  // a full disk must not end the job; the terminal still has it
    bytes.remove_prefix(static_cast<std::size_t>(done));
  }
}

/// As ProgressReporter looks for it.
std::string name_of_pipe(int fd) {
  struct stat found {};
  return fd >= 0 && fstat(fd, &found) == 0 ? detail::concat(fd, ':', found.st_ino) : std::string();
}

int open_log(const WorkerSpec& spec) {
  if (spec.log_file.empty()) return -1;
  const int fd = open(spec.log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  TESSERA_ENSURE(IoError, fd >= 0, spec.log_file, ": cannot be opened: ", std::strerror(errno));
  write_all(fd, spec.log_heading);
  return fd;
}

}  // namespace

Worker::Worker(const WorkerSpec& spec, Sink sink, Clock::time_point epoch)
    : sink_(std::move(sink)), epoch_(epoch), tail_(kTailLines) {
  end_.rank = spec.rank;
  log_ = open_log(spec);
  int output[2] = {-1, -1}, error[2] = {-1, -1}, progress[2] = {-1, -1};
  const int input =
      spec.input >= 0 ? fcntl(spec.input, F_DUPFD_CLOEXEC, 0) : open("/dev/null", O_RDONLY | O_CLOEXEC);
  const bool ready = input >= 0 && pipe2(output, O_CLOEXEC) == 0 && pipe2(error, O_CLOEXEC) == 0 &&
                     pipe2(progress, O_CLOEXEC) == 0;
  Variables variables = spec.environment;
  set_variable(variables, "TESSERA_PROGRESS", name_of_pipe(progress[1]));
  const auto argv = pointers(spec.argv), environment = pointers(variables);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const int core : spec.cores) CPU_SET(static_cast<std::size_t>(core), &cores);
  const Start start{spec.program.c_str(),
                    argv.data(),
                    environment.data(),
                    &spec.signal_mask,
                    getpid(),
                    input,
                    output[1],
                    error[1],
                    spec.guard,
                    progress[1],
                    spec.cores.empty() ? nullptr : &cores};
  end_.pid = ready ? fork() : -1;
  if (end_.pid == 0) run_child(start);
  const int code = errno;
  for (const int fd : {input, output[1], error[1], progress[1]}) {
    if (fd >= 0) close(fd);
  }
  pipes_[0].fd = output[0];
  pipes_[1].fd = error[0];
  progress_ = progress[0];
  for (const int fd : {output[0], error[0], progress_}) {
    if (fd >= 0) fcntl(fd, F_SETFL, O_NONBLOCK);
  }
  running_ = end_.pid > 0;
  if (running_) return;
  for (const int fd : {output[0], error[0], progress_, log_}) {
    if (fd >= 0) close(fd);
  }
  throw IoError(detail::concat("cannot start the process of rank ", spec.rank, ": ", std::strerror(code)));
}

Worker::~Worker() {
  if (running_) {
    kill(-end_.pid, SIGKILL);
    kill(end_.pid, SIGKILL);
    while (waitpid(end_.pid, nullptr, 0) < 0 && errno == EINTR) continue;
  }
  for (const int fd : {pipes_[0].fd, pipes_[1].fd, progress_, log_}) {
    if (fd >= 0) close(fd);
  }
}

void Worker::take(Pipe& pipe, std::string_view bytes) {
  const bool error = &pipe == &pipes_[1];
  if (log_ >= 0) write_all(log_, bytes);
  if (sink_.bytes) sink_.bytes(error, bytes);
  pipe.lines.add(bytes, [&](std::string_view line) {
    tail_.add(line);
    if (sink_.line) sink_.line(error, line);
  });
}

bool Worker::read_piece(Pipe& pipe) {
  std::array<char, std::size_t{1} << 16> buffer;
  if (pipe.fd < 0) return false;
  const ssize_t got = read(pipe.fd, buffer.data(), buffer.size());
  if (got > 0) {
    take(pipe, {buffer.data(), static_cast<std::size_t>(got)});
    return true;
  }
  if (got == 0 || (errno != EAGAIN && errno != EINTR)) finish(pipe);
  return false;
}

void Worker::finish(Pipe& pipe) {
  const bool error = &pipe == &pipes_[1];
  pipe.lines.finish([&](std::string_view line) {
    tail_.add(line);
    if (sink_.line) sink_.line(error, line);
  });
  if (pipe.fd >= 0) close(pipe.fd);
  pipe.fd = -1;
}

/// Its end is that of the worker, or of whatever it has left the pipe to.
void Worker::read_progress() {
  std::array<char, 4096> buffer;
  ssize_t got = 0;
  while (progress_ >= 0 && (got = read(progress_, buffer.data(), buffer.size())) > 0)
    reader_.add({buffer.data(), static_cast<std::size_t>(got)}, now_s());
  if (got == 0 && progress_ >= 0) {
    close(progress_);
    progress_ = -1;
  }
  end_.progress = reader_.progress();
}

void Worker::read_from(int fd) {
  if (fd == progress_ && fd >= 0) return read_progress();
  for (Pipe& pipe : pipes_) {
    if (pipe.fd == fd && fd >= 0) read_piece(pipe);
  }
}

/// What a worker wrote before it ended is in the pipe; what its children in other sessions go on writing is
/// not waited for.
void Worker::drain(Pipe& pipe) {
  const int capacity = pipe.fd >= 0 ? fcntl(pipe.fd, F_GETPIPE_SZ) : 0;
  for (int left = capacity + 1; left > 0 && read_piece(pipe);) left -= 1 << 12;
  finish(pipe);
}

bool Worker::reap() {
  if (!running_) return false;
  siginfo_t info{};
  const int result = waitid(P_PID, static_cast<id_t>(end_.pid), &info, WEXITED | WNOHANG | WNOWAIT);
  if (result != 0 || info.si_pid != end_.pid) return false;
  // As long as the process is not reaped its group's number cannot become somebody else's.
  kill(-end_.pid, SIGKILL);
  int status = 0;
  while (waitpid(end_.pid, &status, 0) < 0 && errno == EINTR) continue;
  running_ = false;
  end_.at_s = std::chrono::duration<double>(Clock::now() - epoch_).count();
  if (WIFSIGNALED(status)) end_.signal = WTERMSIG(status);
  if (WIFEXITED(status)) end_.exit_code = WEXITSTATUS(status);
  for (Pipe& pipe : pipes_) drain(pipe);
  read_progress();
  end_.last_lines = tail_.lines();
  return true;
}

void Worker::signal(int signal_number, bool group) {
  if (!running_) return;
  // Before the child has come to setsid() there is no group.
  if (!group || kill(-end_.pid, signal_number) != 0) kill(end_.pid, signal_number);
}

void Worker::tell_to_end(int signal_number) {
  if (!running_) return;
  if (!end_.told) end_.stopped = is_stopped();
  end_.told = true;
  signal(signal_number, true);
}

void Worker::ask_to_end(int signal_number) {
  if (!running_) return;
  end_.asked = signal_number;
  signal(signal_number, false);
}

bool Worker::is_stopped() const {
  std::ifstream file("/proc/" + std::to_string(end_.pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // "pid (name) state ...", and the name may hold anything.
  const auto name_end = text.rfind(") ");
  return name_end != std::string::npos && (text[name_end + 2] == 'T' || text[name_end + 2] == 't');
}

}  // namespace tessera::launching
