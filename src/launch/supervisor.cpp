#include "launch/supervisor.hpp"

#include <poll.h>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <span>

#include "launch/worker_environment.hpp"

namespace tessera::launching {
namespace {

Clock::duration duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::int64_t system_ms() {
  using std::chrono::system_clock;
  return std::chrono::duration_cast<std::chrono::milliseconds>(system_clock::now().time_since_epoch())
      .count();
}

std::string date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[32];
  gmtime_r(&now, &parts);
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

}  // namespace

Supervisor::Supervisor(const Job& job)
    : job_(job), out_(job.options.stdout_fd), error_(job.options.stderr_fd) {}

void Supervisor::flush() {
  constexpr double kPatience = 5;
  out_.flush(kPatience);
  error_.flush(kPatience);
}

std::optional<Outcome> Supervisor::wait_for_machines() {
  begin_ms_ = system_ms();
  while (job_.machines != nullptr && interrupted_ == 0 && !news_.joined && news_.lost.empty()) {
    wait();
    handle_signals();
    handle_news();
  }
  if (!news_.lost.empty()) throw CommunicationError(news_.lost);
  if (interrupted_ != 0) return local_outcome();
  return std::nullopt;
}

Outcome Supervisor::run(int attempt) {
  begin_ = Clock::now();
  begin_ms_ = system_ms();
  phase_ = Phase::running;
  news_.failed = false;
  news_.verdict.reset();
  if (job_.machines != nullptr) job_.machines->begin(attempt);
  start_workers(attempt);
  bool told = false;
  while (any_running() || (job_.machines != nullptr && !news_.verdict && news_.lost.empty())) {
    wait();
    handle_signals();
    handle_news();
    handle_ends();
    advance();
    if (job_.machines != nullptr && !told && !any_running()) {
      job_.machines->ended(local_outcome());
      told = true;
    }
  }
  const Outcome outcome = local_outcome();
  for (const auto& worker : workers_) job_.guard.remove(worker->pid());
  workers_.clear();
  if (job_.machines == nullptr) return outcome;
  if (news_.verdict) return *news_.verdict;
  Outcome lost;
  lost.kind = Outcome::Kind::lost;
  lost.code = 1;
  lost.report = news_.lost;
  return combine(std::vector{outcome, lost});
}

void Supervisor::start_workers(int attempt) {
  for (int local = 0; local < local_size(); ++local) {
    const WorkerSpec spec = spec_of(local, attempt);
    workers_.push_back(std::make_unique<Worker>(spec, sink_of(spec.rank), begin_));
    job_.log.debug("started rank ", spec.rank, ", pid ", workers_.back()->pid());
  }
}

WorkerSpec Supervisor::spec_of(int local_rank, int attempt) const {
  const LaunchOptions& options = job_.options;
  WorkerSpec spec;
  spec.rank = options.machine_rank * local_size() + local_rank;
  spec.program = options.program;
  spec.argv = options.argv;
  spec.environment = worker_environment(options, {local_rank, attempt, job_.store_address, job_.secret});
  spec.signal_mask = job_.signals.old_mask();
  spec.guard = job_.guard.fd();
  if (options.pin_cores) spec.cores = share_of_cores(local_rank, local_size());
  if (!options.log_dir.empty()) {
    spec.log_file = detail::concat(options.log_dir, "/rank-", spec.rank, ".log");
    spec.log_heading = detail::concat("--- attempt ", attempt, ", ", date(), ", host ", job_.host, " ---\n");
  }
  return spec;
}

Worker::Sink Supervisor::sink_of(int rank) {
  Worker::Sink sink;
  if (!job_.options.quiet) {
    sink.line = [this, prefix = detail::concat("[rank ", rank, "] ")](bool error, std::string_view line) {
      Outlet& outlet = error ? error_ : out_;
      outlet.add(prefix);
      outlet.add(line);
      outlet.add("\n");
    };
  } else if (rank == 0) {
    sink.bytes = [this](bool error, std::string_view bytes) { (error ? error_ : out_).add(bytes); };
  }
  return sink;
}

/// Sleeps until something happens, and moves output.
void Supervisor::wait() {
  std::vector<pollfd> polled{{job_.signals.fd(), POLLIN, 0}};
  if (job_.machines != nullptr) polled.push_back({job_.machines->fd(), POLLIN, 0});
  const std::size_t outlets = polled.size();
  for (Outlet* outlet : {&out_, &error_}) {
    // A negative descriptor is passed over.
    polled.push_back({outlet->empty() ? -1 : outlet->fd(), POLLOUT, 0});
  }
  const std::size_t pipes = polled.size();
  std::vector<Worker*> owners;
  for (const auto& worker : workers_) {
    if (worker->progress() < 0) continue;
    polled.push_back({worker->progress(), POLLIN, 0});
    owners.push_back(worker.get());
  }
  const bool readable = !out_.full() && !error_.full();
  for (const auto& worker : workers_) {
    for (const int fd : {worker->output(), worker->error()}) {
      if (!readable || fd < 0) continue;
      polled.push_back({fd, POLLIN, 0});
      owners.push_back(worker.get());
    }
  }
  // The end of a child is a signal; looking now and then costs nothing and does not depend on it.
  double seconds = 0.25;
  if (phase_ != Phase::running) {
    seconds = std::clamp(std::chrono::duration<double>(next_ - Clock::now()).count(), 0.0, seconds);
  }
  const int ready = ::poll(polled.data(), polled.size(), static_cast<int>(seconds * 1000) + 1);
  if (ready <= 0) return;
  if (polled[outlets].revents != 0) out_.write_some();
  if (polled[outlets + 1].revents != 0) error_.write_some();
  for (std::size_t i = pipes; i < polled.size(); ++i) {
    if (polled[i].revents != 0) owners[i - pipes]->read_from(polled[i].fd);
  }
}

void Supervisor::handle_signals() {
  while (const auto signal_number = job_.signals.next()) handle_signal(*signal_number);
}

void Supervisor::handle_signal(int signal_number) {
  if (signal_number == SIGCHLD || signal_number == SIGPIPE) return;
  if (signal_number == SIGUSR2) {
    for (const auto& worker : workers_) worker->signal(signal_number, false);
    return;
  }
  if (signal_number == SIGUSR1) return preempt(signal_number);
  // A scheduler may send SIGTERM several times while ranks save.
  if (interrupted_ == SIGTERM && signal_number == SIGTERM) return;
  if (interrupted_ != 0) {
    end_all(SIGKILL);
    enter(Phase::killing, 0);
    return;
  }
  interrupted_ = signal_number;
  if (phase_ != Phase::running || workers_.empty()) return;
  if (signal_number == SIGTERM) {
    preempt(signal_number);
  } else {
    end_all(signal_number);
  }
  const double grace_s = grace();
  job_.log.info("passing ", signal_text(signal_number), " on; who is not done in ", grace_s,
                " s is killed, and Ctrl-C ends everything at once");
  enter(Phase::ending, grace_s);
}

/// Asks the workers to save and end. After SIGUSR1 they may take their time: it is an early notice.
void Supervisor::preempt(int signal_number) {
  preempted_ = signal_number;
  for (const auto& worker : workers_) worker->ask_to_end(signal_number);
}

/// How long workers may take to end: as configured, and besides that for the step they are in and a save.
double Supervisor::grace() const {
  Progress slowest;
  for (const auto& worker : workers_) slowest.join(worker->end().progress);
  // Until one has been made, nobody knows how long a save takes.
  const double save_s = slowest.saved == 0 && preempted_ != 0 ? job_.options.first_save_s : slowest.save_s;
  return job_.options.grace_s + slowest.step_s + save_s;
}

std::optional<Outcome> Supervisor::pause(double seconds) {
  const auto deadline = Clock::now() + duration(seconds);
  phase_ = Phase::running;
  while (interrupted_ == 0 && preempted_ == 0 && news_.lost.empty() && Clock::now() < deadline) {
    wait();
    handle_signals();
    if (job_.machines != nullptr) news_ = job_.machines->news();
  }
  if (!news_.lost.empty()) throw CommunicationError(news_.lost);
  if (interrupted_ != 0 && interrupted_ != SIGTERM) return local_outcome();
  if (interrupted_ == 0 && preempted_ == 0) return std::nullopt;
  Outcome outcome;
  outcome.kind = Outcome::Kind::preempted;
  outcome.code = exit_code::kPreempted;
  outcome.report =
      detail::concat("asked to end by ", signal_text(preempted_ != 0 ? preempted_ : interrupted_),
                     " on host ", job_.host, " while it waited to start again");
  return outcome;
}

void Supervisor::handle_news() {
  if (job_.machines == nullptr) return;
  news_ = job_.machines->news();
  if (news_.failed || !news_.lost.empty()) fail();
}

void Supervisor::handle_ends() {
  for (const auto& worker : workers_) {
    if (!worker->reap()) continue;
    job_.guard.remove(worker->pid());
    const WorkerEnd& end = worker->end();
    if (phase_ != Phase::running) continue;
    // Ranks agree to be preempted: the others are about to end as well.
    if (end.preempted() || end.ended_as_asked()) {
      enter(Phase::ending, grace());
      continue;
    }
    if (!end.failed() || end.told) continue;
    job_.log.debug("rank ", worker->rank(), " failed");
    if (job_.machines != nullptr) job_.machines->failed();
    fail();
  }
}

/// Something failed, here or elsewhere: what explains it may still be under way.
void Supervisor::fail() {
  if (phase_ == Phase::running) enter(Phase::collecting, job_.options.collect_s);
}

/// Takes the next step when the time of the present one is over.
void Supervisor::advance() {
  if (phase_ == Phase::running || Clock::now() < next_ || !any_running()) return;
  if (phase_ == Phase::collecting) {
    end_all(SIGTERM);
    // One that is stopped cannot hear that.
    for (const auto& worker : workers_) {
      if (worker->running() && worker->end().stopped) worker->tell_to_end(SIGKILL);
    }
    enter(Phase::ending, job_.options.failure_grace_s);
  } else {
    end_all(SIGKILL);
    enter(Phase::killing, 1);
  }
}

void Supervisor::enter(Phase phase, double seconds) {
  phase_ = phase;
  next_ = Clock::now() + duration(seconds);
}

void Supervisor::end_all(int signal_number) {
  for (const auto& worker : workers_) worker->tell_to_end(signal_number);
}

bool Supervisor::any_running() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->running(); });
}

Outcome Supervisor::local_outcome() const {
  std::vector<WorkerEnd> ends;
  for (const auto& worker : workers_) ends.push_back(worker->end());
  Outcome outcome = outcome_of(ends, job_.host, begin_ms_);
  const bool failed =
      std::any_of(ends.begin(), ends.end(), [](const WorkerEnd& end) { return end.failed(); });
  const int by = interrupted_ != 0 ? interrupted_ : preempted_;
  // What failed before the signal came, or failed to save, is still the reason.
  if (by == 0 || outcome.kind == Outcome::Kind::failed || (!ends.empty() && !failed)) return outcome;
  outcome.kind = Outcome::Kind::interrupted;
  outcome.code = exit_code::kSignal + by;
  outcome.report = detail::concat("ended by ", signal_text(by), " on host ", job_.host);
  return outcome;
}

}  // namespace tessera::launching
