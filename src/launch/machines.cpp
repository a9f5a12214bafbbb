#include "launch/machines.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "launch/open_secret.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/timeout.hpp"

namespace tessera::launching {
namespace {

constexpr double kTry = 2;                           ///< seconds for one attempt to reach the store
constexpr const char* kSecretKey = "launch/secret";  ///< which machine has a secret, where the store is open
constexpr double kTurn = 0.2;                        ///< seconds between looks at the store
constexpr double kLostInFailure = 5;  ///< once something failed, a silent launcher is given up sooner
constexpr double kFarewell = 5;       ///< for the others to read the verdict
constexpr std::string_view kAllOrNone =
    "give every machine the same --secret_file (or TESSERA_JOB_SECRET), or none";

}  // namespace

Machines::Machines(const LaunchOptions& options, std::string secret, std::string host,
                   const StoreServer* server)
    : options_(options),
      secret_(std::move(secret)),
      host_(std::move(host)),
      server_(server),
      peers_(static_cast<std::size_t>(options.num_machines)) {
  event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  TESSERA_ENSURE(IoError, event_ >= 0, "eventfd: ", std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

Machines::~Machines() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
  close(event_);
}

News Machines::news() {
  std::uint64_t count = 0;
  static_cast<void>(read(event_, &count, sizeof count));
  const std::lock_guard lock(mutex_);
  return news_;
}

void Machines::begin(int attempt) {
  const std::lock_guard lock(mutex_);
  attempt_ = attempt;
  failed_ = failed_told_ = outcome_told_ = false;
  outcome_.reset();
  news_.failed = false;
  news_.verdict.reset();
}

void Machines::failed() {
  const std::lock_guard lock(mutex_);
  failed_ = true;
}

void Machines::ended(const Outcome& outcome) {
  const std::lock_guard lock(mutex_);
  outcome_ = outcome;
}

/// Makes the news known to the thread that polls.
void Machines::announce() {
  const std::uint64_t one = 1;
  static_cast<void>(write(event_, &one, sizeof one));
}

/// False when it is time to stop.
bool Machines::pause(double seconds) {
  std::unique_lock lock(mutex_);
  return !stop_changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stop_; });
}

std::string Machines::key(const std::string& what, int machine) const {
  return detail::concat("launch/", what, "/", machine);
}

std::string Machines::attempt_key(int attempt, const std::string& what) const {
  return detail::concat("launch/attempt-", attempt, "/", what);
}

void Machines::run() {
  try {
    if (!join()) return;
    reached_s_ = now_s();
    do {
      exchange_in_time();
    } while (pause(kTurn));
    // The last outcome may have been given after the last look.
    farewell(1, options_.num_machines);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    if (news_.joined) {
      news_.lost = detail::concat("the launcher of machine 0 (", options_.main_process_ip, ":",
                                  options_.main_process_port, ") is gone: ", error.what());
    } else {
      news_.lost = error.what();
    }
  }
  announce();
}

/// False when it is time to stop before the others have come.
bool Machines::join() {
  const double deadline = now_s() + options_.join_timeout_s;
  if (!connect(deadline)) return false;
  store_->set(key("machine", options_.machine_rank),
              detail::concat(options_.num_processes, " processes on ", options_.num_machines, " machines, ",
                             options_.max_restarts, " restarts; ", host_));
  meet(deadline);
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return false;
    news_.joined = true;
  }
  announce();
  return true;
}

/// In which way this machine's secret is not that of machine 0, which is told if one of them has none.
std::string Machines::mismatch() const {
  const bool none = options_.secret.empty();
  try {
    Store open(options_.main_process_ip, options_.main_process_port,
               std::string(none ? kTurnedAway : kOpenSecret), kTry);
    open.set(kSecretKey, detail::concat("machine ", options_.machine_rank, " (host ", host_, ")"));
    return "has a secret, and machine 0 has none";
  } catch (const CommunicationError&) {
    return none ? "has no secret, and machine 0 has one" : "has another secret than machine 0";
  }
}

bool Machines::connect(double deadline_s) {
  while (!store_) {
    try {
      store_ = std::make_unique<Store>(options_.main_process_ip, options_.main_process_port, secret_,
                                       std::clamp(deadline_s - now_s(), kTurn, kTry));
    } catch (const CommunicationError& error) {
      // A server that refuses the secret will not change its mind.
      if (std::string_view(error.what()).find("secret") != std::string_view::npos) {
        throw CommunicationError(detail::concat("machine ", options_.machine_rank, " (host ", host_, ") ",
                                                mismatch(), ": ", kAllOrNone, " (", error.what(), ")"));
      }
      TESSERA_ENSURE(CommunicationError, now_s() < deadline_s, "machine ", options_.machine_rank,
                     " found no launcher of machine 0 at ", options_.main_process_ip, ":",
                     options_.main_process_port, " within ", options_.join_timeout_s, " s: ", error.what());
    }
    if (!pause(0)) return false;
  }
  return true;
}

/// Waits for the launchers of all machines and compares what they were told.
void Machines::meet(double deadline_s) {
  std::string ours;
  for (int machine = 0; machine < options_.num_machines;) {
    Peer& peer = peers_[static_cast<std::size_t>(machine)];
    std::string theirs;
    if (store_->try_get(key("machine", machine), theirs)) {
      const auto split = theirs.find("; ");
      peer.host = split == std::string::npos ? "" : theirs.substr(split + 2);
      theirs = theirs.substr(0, split);
      if (machine == 0) ours = theirs;
      if (theirs != ours) {
        farewell(machine, machine + 1);
        throw CommunicationError(detail::concat("the launchers were told different things: machine 0 ", ours,
                                                "; machine ", machine, " (host ", peer.host, ") ", theirs));
      }
      ++machine;
      continue;
    }
    refuse_mismatch();
    if (now_s() >= deadline_s) {
      std::string missing;
      for (int m = 0; m < options_.num_machines; ++m) {
        if (!store_->try_get(key("machine", m), theirs))
          missing += detail::concat(missing.empty() ? "" : ", ", m);
      }
      throw CommunicationError(detail::concat("of ", options_.num_machines,
                                              " machines these did not come within ", options_.join_timeout_s,
                                              " s: machine_rank ", missing));
    }
    if (!pause(kTurn)) return;
  }
  for (Peer& peer : peers_) peer.heard_s = now_s();
}

/// A machine that has no secret where this one has, or the other way round, will not come.
void Machines::refuse_mismatch() {
  std::string who;
  if (store_->try_get(kSecretKey, who)) {
    throw CommunicationError(detail::concat(who, " has a secret, and machine 0 has none: ", kAllOrNone));
  }
  if (server_ == nullptr || server_->turned_away() == 0) return;
  throw CommunicationError(detail::concat("a machine without a secret came to ", options_.main_process_ip,
                                          ":", options_.main_process_port,
                                          ", and machine 0 has one: ", kAllOrNone));
}

/// The machine that keeps the store waits a little for machines `first` to `end` - 1, which must still read
/// in it how things ended; those say that they have.
void Machines::farewell(int first, int end) {
  if (options_.machine_rank != 0) return store_->set(key("seen", options_.machine_rank), "yes");
  for (const double deadline = now_s() + kFarewell; now_s() < deadline;) {
    std::string seen;
    bool all = true;
    for (int machine = first; machine < end; ++machine) {
      all = all &&
            (peers_[static_cast<std::size_t>(machine)].lost || store_->try_get(key("seen", machine), seen));
    }
    if (all) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(kTurn));
  }
}

/// A store that is slow, on a busy machine, is not a lost one until its launcher would count as lost.
void Machines::exchange_in_time() {
  try {
    exchange();
    reached_s_ = now_s();
  } catch (const CommunicationTimeout&) {
    if (now_s() - reached_s_ > options_.lost_machine_s) throw;
  }
}

void Machines::exchange() {
  int attempt = 0;
  bool failed = false;
  std::optional<Outcome> outcome;
  {
    const std::lock_guard lock(mutex_);
    attempt = attempt_;
    failed = failed_ && !failed_told_;
    if (!outcome_told_) outcome = outcome_;
  }
  store_->set(key("beat", options_.machine_rank), std::to_string(++beats_));
  if (failed) store_->set(attempt_key(attempt, "failed"), host_);
  if (outcome) store_->set(attempt_key(attempt, key("ended", options_.machine_rank)), outcome->encode());
  {
    const std::lock_guard lock(mutex_);
    if (attempt_ == attempt) {
      failed_told_ = failed_told_ || failed;
      outcome_told_ = outcome_told_ || outcome.has_value();
    }
  }
  listen();

  std::string text;
  const bool failing = store_->try_get(attempt_key(attempt, "failed"), text);
  if (options_.machine_rank == 0) judge(attempt, failing);
  std::optional<Outcome> verdict;
  if (store_->try_get(attempt_key(attempt, "verdict"), text)) verdict = Outcome::decode(text);
  {
    const std::lock_guard lock(mutex_);
    if (attempt_ != attempt || (failing == news_.failed && verdict.has_value() == news_.verdict.has_value()))
      return;
    news_.failed = failing;
    news_.verdict = verdict;
  }
  announce();
}

/// Looks whose launcher is alive.
void Machines::listen() {
  for (int machine = 0; machine < options_.num_machines; ++machine) {
    Peer& peer = peers_[static_cast<std::size_t>(machine)];
    std::string beat;
    if (store_->try_get(key("beat", machine), beat) && beat != peer.beat) {
      peer.beat = beat;
      peer.heard_s = now_s();
    }
  }
}

/// Machine 0: the verdict, once every machine has ended or is lost.
void Machines::judge(int attempt, bool failing) {
  std::vector<Outcome> outcomes;
  std::string text;
  if (store_->try_get(attempt_key(attempt, "verdict"), text)) return;
  const double patience = failing ? kLostInFailure : options_.lost_machine_s;
  bool all = true;
  for (int machine = 0; machine < options_.num_machines; ++machine) {
    Peer& peer = peers_[static_cast<std::size_t>(machine)];
    if (store_->try_get(attempt_key(attempt, key("ended", machine)), text)) {
      outcomes.push_back(Outcome::decode(text));
      continue;
    }
    if (now_s() - peer.heard_s < patience) {
      all = false;
      continue;
    }
    if (!peer.lost) store_->set(attempt_key(attempt, "failed"), peer.host);
    peer.lost = true;
    Outcome lost;
    lost.kind = Outcome::Kind::lost;
    lost.code = 1;
    lost.report = detail::concat("the launcher of machine ", machine, " (host ", peer.host,
                                 ") gave no answer for ", patience, " s");
    outcomes.push_back(lost);
  }
  if (all) store_->set(attempt_key(attempt, "verdict"), combine(outcomes).encode());
}

}  // namespace tessera::launching
