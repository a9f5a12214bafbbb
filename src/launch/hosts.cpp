#include "launch/hosts.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>

#include "base/host_name.hpp"
#include "launch/command.hpp"
#include "launch/environment.hpp"
#include "launch/orders.hpp"
#include "launch/signals.hpp"
#include "launch/words.hpp"
#include "launch/worker.hpp"

namespace tessera::launching {
namespace {

constexpr int kSshFailed = 255;
/// How long the others may take to end by themselves once one has ended with an error: their launchers tell
/// each other, unless one of them has never come so far.
constexpr std::chrono::seconds kPatience{10};

/// What a variable's name begins with that all machines have as this one does. Their layout of processes is
/// not among them: each launcher makes it anew.
constexpr std::array<std::string_view, 14> kShared{
    "ACCELERATE_", "GLOO_",  "HF_",      "MEGATRON_LM_", "MLFLOW", "NCCL",          "OMP_",
    "MV2",         "PYTHON", "TESSERA_", "TOKENIZERS_",  "UCX",    "TRANSFORMERS_", "WANDB_"};

bool is_this_machine(const std::string& name) {
  const std::string own = host_name();
  return name == "localhost" || name == "127.0.0.1" || name == own || name == own.substr(0, own.find('.'));
}

/// A word as every shell reads it back.
std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// What all machines have as this one does. Errors: ConfigError for one that is named and not there.
Variables shared_variables(const HostsJob& job) {
  Variables shared;
  for (const std::string& variable : job.environment) {
    const bool known = std::any_of(kShared.begin(), kShared.end(),
                                   [&](std::string_view begin) { return variable.starts_with(begin); });
    if (known && !variable.starts_with("TESSERA_PROGRESS=")) shared.push_back(variable);
  }
  for (const std::string& name : split(job.settings.export_env.value_or(""), ',')) {
    if (name.empty()) continue;
    const auto value = value_of(job.environment, name);
    TESSERA_ENSURE(ConfigError, value.has_value(), "export_env names ", name, ", which is not set here");
    set_variable(shared, name, *value);
  }
  return shared;
}

/// The launcher of one machine, as seen from here.
struct Remote {
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Outlet> input;
  int pipe = -1;

  void close_input() {
    if (pipe >= 0) close(pipe);
    pipe = -1;
    input.reset();
  }
};

/// Watches the launchers of all machines: one loop, as the Supervisor's.
class HostsSupervisor {
 public:
  HostsSupervisor(const HostsJob& job, const Logger& log, SignalWatch& signals, Guard& guard)
      : job_(job), log_(log), signals_(signals), guard_(guard), out_(1), error_(2) {}
  ~HostsSupervisor() {
    for (Remote& remote : remotes_) remote.close_input();
  }
  HostsSupervisor(const HostsSupervisor&) = delete;
  HostsSupervisor& operator=(const HostsSupervisor&) = delete;

  LaunchResult run() {
    for (std::size_t host = 0; host < job_.hosts.size(); ++host) {
      LaunchProgram program;
      program.command = command_of_host(job_, host);
      program.environment = job_.environment;
      commands_.push_back(find_command(program));
    }
    for (std::size_t host = 0; host < job_.hosts.size(); ++host) start(host);
    while (any_running()) {
      wait();
      while (const auto signal_number = signals_.next()) handle_signal(*signal_number);
      handle_ends();
      if (told_ || !deadline_ || Clock::now() < *deadline_) continue;
      told_ = true;
      send(SIGTERM);
    }
    out_.flush(5);
    error_.flush(5);
    return result();
  }

 private:
  bool any_running() const {
    return std::any_of(remotes_.begin(), remotes_.end(), [](const Remote& r) { return r.worker->running(); });
  }

  void start(std::size_t host) {
    int ends[2] = {-1, -1};
    TESSERA_ENSURE(IoError, pipe2(ends, O_CLOEXEC) == 0, "pipe: ", std::strerror(errno));
    WorkerSpec spec;
    spec.rank = static_cast<int>(host);
    spec.program = commands_[host].path;
    spec.argv = commands_[host].argv;
    spec.environment = job_.environment;
    spec.signal_mask = signals_.old_mask();
    spec.guard = guard_.fd();
    spec.input = ends[0];
    Remote remote;
    remote.pipe = ends[1];
    remote.input = std::make_unique<Outlet>(ends[1]);
    remote.input->add(encode_orders(settings_of_host(job_, host)));
    remote.worker = std::make_unique<Worker>(spec, sink_of(host), epoch_);
    close(ends[0]);
    log_.debug("started the launcher of ", job_.hosts[host].name, ", pid ", remote.worker->pid());
    remotes_.push_back(std::move(remote));
  }

  /// Lines of ranks say whose they are; others get the machine's name. Quietly, what rank 0 writes comes as
  /// it is.
  Worker::Sink sink_of(std::size_t host) {
    Worker::Sink sink;
    if (job_.settings.quiet.value_or(false) && host == 0) {
      sink.bytes = [this](bool error, std::string_view bytes) { (error ? error_ : out_).add(bytes); };
      return sink;
    }
    sink.line = [this, prefix = "[" + job_.hosts[host].name + "] "](bool error, std::string_view line) {
      Outlet& outlet = error ? error_ : out_;
      if (!line.starts_with("[rank ")) outlet.add(prefix);
      outlet.add(line);
      outlet.add("\n");
    };
    return sink;
  }

  /// Sleeps until something happens, and moves output and input.
  void wait() {
    std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}};
    std::vector<Outlet*> outlets{&out_, &error_};
    for (const Remote& remote : remotes_) {
      if (remote.input) outlets.push_back(remote.input.get());
    }
    for (const Outlet* outlet : outlets) polled.push_back({outlet->empty() ? -1 : outlet->fd(), POLLOUT, 0});
    std::vector<Worker*> owners;
    const bool readable = !out_.full() && !error_.full();
    for (const Remote& remote : remotes_) {
      for (const int fd : {remote.worker->output(), remote.worker->error(), remote.worker->progress()}) {
        if (!readable || fd < 0) continue;
        polled.push_back({fd, POLLIN, 0});
        owners.push_back(remote.worker.get());
      }
    }
    constexpr int kLookAnywayMs = 250;  // at what has ended, and at deadlines
    if (::poll(polled.data(), polled.size(), kLookAnywayMs) <= 0) return;
    for (std::size_t i = 0; i < outlets.size(); ++i) {
      if (polled[1 + i].revents != 0) outlets[i]->write_some();
    }
    for (std::size_t i = 0; i < owners.size(); ++i) {
      const pollfd& ready = polled[1 + outlets.size() + i];
      if (ready.revents != 0) owners[i]->read_from(ready.fd);
    }
  }

  void handle_signal(int signal_number) {
    if (signal_number == SIGCHLD || signal_number == SIGPIPE) return;
    const bool ends = signal_number != SIGUSR1 && signal_number != SIGUSR2;
    if (ends) asked_ = asked_ == 0 ? signal_number : asked_;
    // The launchers end within their grace, and at once when they are asked again. Who asks a third time does
    // not want to wait for them.
    if (ends && signal_number != SIGTERM && ++times_ > 2) {
      for (const Remote& remote : remotes_) remote.worker->tell_to_end(SIGKILL);
      return;
    }
    send(signal_number);
  }

  void send(int signal_number) {
    const char byte = static_cast<char>(signal_number);
    for (const Remote& remote : remotes_) {
      if (remote.input) remote.input->add({&byte, 1});
    }
  }

  void handle_ends() {
    for (Remote& remote : remotes_) {
      if (!remote.worker->reap()) continue;
      guard_.remove(remote.worker->pid());
      remote.close_input();
      const WorkerEnd& end = remote.worker->end();
      if (end.code() == exit_code::kDone || end.preempted()) continue;
      if (!first_) first_ = static_cast<std::size_t>(end.rank);
      // A launcher that could not be started is waited for by the others, for a long time.
      const bool absent = !why_absent(end).empty();
      if (!deadline_ || absent) deadline_ = Clock::now() + (absent ? std::chrono::seconds(0) : kPatience);
    }
  }

  /// Why there is no launcher on a machine; empty if there was one, which has then said itself what happened.
  std::string why_absent(const WorkerEnd& end) const {
    const bool by_ssh = !is_this_machine(job_.hosts[static_cast<std::size_t>(end.rank)].name);
    if (end.signal != 0) return detail::concat("was ended here by ", signal_text(end.signal));
    if (end.exit_code == kSshFailed && by_ssh) return "ssh could not reach it, or lost the connection";
    if (end.exit_code == exit_code::kNotFound || end.exit_code == exit_code::kNoPermission) {
      return detail::concat("there is no ", job_.launcher.front(),
                            " to be executed: Tessera must be at the same place on all machines");
    }
    return {};
  }

  LaunchResult result() const {
    LaunchResult result;
    if (!first_) {
      for (const Remote& remote : remotes_)
        result.exit_code = std::max(result.exit_code, remote.worker->end().code());
      return result;
    }
    const WorkerEnd& end = remotes_[*first_].worker->end();
    const std::string why = why_absent(end);
    result.exit_code = why.empty() ? end.code() : exit_code::kLostPeer;
    if (asked_ != 0 && end.signal == SIGKILL) result.exit_code = exit_code::kSignal + asked_;
    if (!why.empty())
      result.report = detail::concat("machine ", *first_, " (", job_.hosts[*first_].name, "): ", why);
    return result;
  }

  const HostsJob& job_;
  const Logger& log_;
  SignalWatch& signals_;
  Guard& guard_;
  Outlet out_, error_;
  const Clock::time_point epoch_ = Clock::now();
  std::vector<Command> commands_;
  std::vector<Remote> remotes_;
  std::optional<std::size_t> first_;           ///< the machine that first ended with an error
  std::optional<Clock::time_point> deadline_;  ///< when the others are told to end
  bool told_ = false;
  int asked_ = 0;  ///< the first signal that asked for the end
  int times_ = 0;  ///< how often somebody at a terminal has
};

}  // namespace

LaunchSettings settings_of_host(const HostsJob& job, std::size_t host) {
  LaunchSettings settings = job.settings;
  settings.machine_rank = static_cast<std::int64_t>(host);
  settings.hostfile = settings.include = settings.exclude = settings.export_env = settings.secret_file =
      std::nullopt;
  settings.ssh_port = std::nullopt;
  settings.allow_secret_mode = std::nullopt;
  settings.warnings.clear();
  Variables variables = shared_variables(job);
  set_variables(variables, settings.environment);
  set_variable(variables, "TESSERA_JOB_SECRET", job.secret);
  if (const auto gpus = visible_gpus(job.hosts[host])) set_variable(variables, "CUDA_VISIBLE_DEVICES", *gpus);
  settings.environment = std::move(variables);
  return settings;
}

std::vector<std::string> command_of_host(const HostsJob& job, std::size_t host) {
  const std::string& name = job.hosts[host].name;
  std::string command = "cd " + quoted(job.folder) + " && exec";
  for (const std::string& word : job.launcher) command += " " + quoted(word);
  if (is_this_machine(name)) return {"/bin/sh", "-c", command};
  // Nobody is there to answer a question, and a machine that is gone must not be waited for.
  std::vector<std::string> words{"ssh", "-T",
                                 "-o",  "BatchMode=yes",
                                 "-o",  "ServerAliveInterval=15",
                                 "-o",  "ServerAliveCountMax=4",
                                 "-o",  "ConnectTimeout=30"};
  if (job.settings.ssh_port) {
    words.push_back("-p");
    words.push_back(std::to_string(*job.settings.ssh_port));
  }
  words.insert(words.end(), {name, command});
  return words;
}

LaunchResult launch_on_hosts(const HostsJob& job, const Logger& log) {
  SignalWatch signals;
  // Before any thread is started, as in launch().
  Guard guard(job.hosts.size());
  return HostsSupervisor(job, log, signals, guard).run();
}

}  // namespace tessera::launching
