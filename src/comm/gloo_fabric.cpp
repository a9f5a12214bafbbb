#include "comm/gloo_fabric.hpp"

#include <algorithm>
#include <exception>

#include "comm/check.hpp"
#include "comm/gloo_signals.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/timeout.hpp"

namespace tessera {

namespace {

/// Gloo's own waits never time out: a timeout there closes every connection. The guard keeps the deadlines.
constexpr auto kForever = std::chrono::milliseconds(std::chrono::hours(24 * 365));
/// How long a waiting call lets the guard find out why a connection broke.
constexpr double kExplainTimeout = 15;
constexpr std::size_t kFinishedKept = 256;

}  // namespace

std::string error_key(const std::string& job, int rank) { return job + "/error/" + std::to_string(rank); }

std::uint64_t gloo_slot(std::initializer_list<std::uint64_t> parts) {
  std::uint64_t hash = 0x9e3779b97f4a7c15u;
  for (const std::uint64_t part : parts) {  // splitmix64's mixing, once for each part
    hash += part + 0x9e3779b97f4a7c15u;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
    hash ^= hash >> 31;
  }
  return hash;
}

void GlooGroup::called(const GlooCall& call) {
  const std::lock_guard lock(mutex_);
  latest_ = call;
  latest_time_ = store::Clock::now();
  if (!call.collective) return;
  collectives_ = call.sequence + 1;
  recent_[call.sequence % recent_.size()] = call;
}

std::uint64_t GlooGroup::collectives() const {
  const std::lock_guard lock(mutex_);
  return collectives_;
}

std::string GlooGroup::collective(std::uint64_t sequence) const {
  GlooCall call;
  {
    const std::lock_guard lock(mutex_);
    call = recent_[sequence % recent_.size()];
  }
  return call.sequence == sequence && call.operation[0] != '\0' ? describe(call) : std::string();
}

std::pair<store::Deadline, std::string> GlooGroup::latest() const {
  const std::lock_guard lock(mutex_);
  return {latest_time_, latest_.operation[0] != '\0' ? describe(latest_) : std::string()};
}

std::string GlooGroup::describe(const GlooCall& call) const {
  constexpr std::size_t kMostShown = 16;
  std::string members = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMostShown); ++i)
    members += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > kMostShown) members += detail::concat(", ..., ", ranks.size(), " in all");
  return detail::concat(call.operation, " ", call.sequence, " on group ", name, " (", members, ") at ",
                        place_of(call.where));
}

GlooFabric::GlooFabric(std::shared_ptr<Store> store, int rank, int size, const GlooOptions& options)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      job_(options.job),
      while_waiting_(options.while_waiting) {
  const double timeout_s = options.comm.timeout_s;
  std::string events;
  if (store_->try_get(key("events"), events)) next_event_ = std::stoll(events) + 1;
  store_->barrier(key("join"), rank, size, timeout_s);
  connect(options);
  const SignalsBlocked signals;
  watcher_ = std::thread([this] { watch_connections(); });
  guard_ = std::thread([this] { guard(); });
  try {
    exchange_names(timeout_s);
  } catch (...) {
    stop();
    throw;
  }
}

GlooFabric::~GlooFabric() {
  if (std::uncaught_exceptions() > 0) give_up();
  leave();
}

void GlooFabric::leave() {
  {
    std::unique_lock lock(mutex_);
    if (left_) return;
    left_ = true;
    changed_.wait(lock, [&] { return calls_ == 0 || failed_; });
    no_more_orphans_ = true;
    changed_.notify_all();
  }
  if (finisher_.joinable()) finisher_.join();
  if (!failed_) say_goodbye();
  stop();
  set_failure(name_of(rank_) + " has left the job", Origin::elsewhere);
  store_.reset();
}

void GlooFabric::call_queued() {
  const std::lock_guard lock(mutex_);
  ++calls_;
}

void GlooFabric::call_finished() {
  const std::lock_guard lock(mutex_);
  if (--calls_ == 0) changed_.notify_all();
}

void GlooFabric::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (rouser_.joinable()) rouser_.join();
  interrupt_.raise();
  guard_.join();
  goodbye_buffer_->abortWaitRecv();
  watcher_.join();
}

std::string GlooFabric::name_of(int rank) const {
  const char* name = names_[static_cast<std::size_t>(rank)].data();
  return name[0] == '\0' ? detail::concat("rank ", rank) : detail::concat("rank ", rank, " (", name, ")");
}

void GlooFabric::add_group(const std::shared_ptr<GlooGroup>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& other) { return other.expired(); });
  groups_.push_back(group);
}

GlooMessage GlooFabric::post(GlooMessage::Kind kind, int peer, std::uint64_t slot, void* data,
                             std::size_t bytes, const GroupPtr& group, const GlooCall& call) {
  check(group, call);
  GlooMessage message{kind, peer, context_->createUnboundBuffer(data, bytes)};
  try {
    const PipeSignalBlocked signal;
    if (kind == GlooMessage::Kind::send) {
      message.buffer->send(peer, slot, 0, bytes);
    } else {
      message.buffer->recv(peer, slot, 0, bytes);
    }
  } catch (const std::exception&) {
    lost(peer);
    throw_failure(group, call);
  }
  return message;
}

void GlooFabric::call_while_waiting() {
  try {
    while_waiting_();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    fail(detail::concat("rank ", rank_, " failed: ", text.substr(0, text.find('\n'))));
    throw;
  }
}

/// Gloo's waits know no interruption: those of callers are ended now and then, look around, and go on.
void GlooFabric::rouse_callers() {
  std::unique_lock lock(mutex_);
  const auto is_caller = [](const Wait& wait) { return wait.caller; };
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || std::any_of(waits_.begin(), waits_.end(), is_caller); });
    const std::chrono::duration<double> pause(kWhileWaiting);
    if (changed_.wait_for(lock, pause, [&] { return stopping_; })) return;
    for (const Wait& wait : waits_) {
      if (!wait.caller) continue;
      wait.kind == GlooMessage::Kind::send ? wait.buffer->abortWaitSend() : wait.buffer->abortWaitRecv();
    }
  }
}

void GlooFabric::wait(GlooMessage& message, const GroupPtr& group, const GlooCall& call, double timeout_s,
                      bool caller) {
  caller = caller && while_waiting_;
  Waits::iterator entry;
  {
    std::unique_lock lock(mutex_);
    if (failed_) {
      lock.unlock();
      throw_failure(group, call);
    }
    entry = waits_.insert(waits_.end(), Wait{next_wait_++, message.buffer.get(), message.kind, message.peer,
                                             group, call, timeout_s, store::after(timeout_s), caller});
    if (caller && !rouser_.joinable() && !stopping_) {
      const SignalsBlocked signals;
      rouser_ = std::thread([this] { rouse_callers(); });
    }
    if (caller) changed_.notify_all();
    if (entry->deadline < wake_) {
      wake_ = entry->deadline;
      interrupt_.raise();
    }
  }
  bool done = false, broken = false;
  std::exception_ptr interrupted;
  while (!done && !broken && !interrupted) {
    try {
      done = message.kind == GlooMessage::Kind::send ? message.buffer->waitSend(kForever)
                                                     : message.buffer->waitRecv(kForever);
    } catch (const std::exception&) {
      broken = true;
    }
    if (done || broken || failed_ || !caller) break;
    try {
      call_while_waiting();
    } catch (...) {
      interrupted = std::current_exception();
    }
  }
  std::unique_ptr<gloo::transport::UnboundBuffer> oldest;  // ends without the lock
  {
    const std::lock_guard lock(mutex_);
    waits_.erase(entry);
    if (done) finished_.push_back(std::move(message.buffer));
    if (finished_.size() > kFinishedKept) {
      oldest = std::move(finished_.front());
      finished_.pop_front();
    }
  }
  if (done) return;
  if (interrupted) std::rethrow_exception(interrupted);
  if (broken) lost(message.peer);
  throw_failure(group, call);
}

bool GlooFabric::set_failure(const std::string& reason, Origin origin) {
  constexpr std::size_t kLongest = 64 * 1024;  // well below what the store takes
  const std::lock_guard lock(mutex_);
  if (failed_) return false;
  reason_ = reason.substr(0, kLongest);
  origin_ = origin;
  failed_ = true;
  for (const Wait& wait : waits_) {
    wait.buffer->abortWaitSend();
    wait.buffer->abortWaitRecv();
  }
  changed_.notify_all();
  return true;
}

std::string GlooFabric::failure() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void GlooFabric::fail(const std::string& reason) {
  if (set_failure(reason, Origin::here)) interrupt_.raise();
}

void GlooFabric::give_up() {
  if (set_failure(name_of(rank_) + " ended with an exception", Origin::unwinding)) interrupt_.raise();
}

void GlooFabric::lost(int peer) {
  std::unique_lock lock(mutex_);
  lost_.insert(peer);
  interrupt_.raise();
  changed_.wait_until(lock, store::after(kExplainTimeout), [&] { return failed_.load(); });
}

void GlooFabric::check(const GroupPtr& group, const GlooCall& call) const {
  if (failed_) throw_failure(group, call);
}

void GlooFabric::throw_failure(const GroupPtr& group, const GlooCall& call) const {
  const std::lock_guard lock(mutex_);
  const std::string text = detail::concat(failed_ ? reason_ : "a connection was lost", " [",
                                          group->describe(call), ", on ", name_of(rank_), "]");
  if (failed_ && origin_ == Origin::late) throw CommunicationTimeout(text);
  throw CommunicationError(text);
}

struct GlooFabric::Orphan {
  std::shared_ptr<void> keep;
  std::vector<GlooMessage> messages;  // destroyed before the memory they use
  GroupPtr group;
  GlooCall call;
  double timeout_s;
};

void GlooFabric::finish_alone(std::vector<GlooMessage> messages, std::shared_ptr<void> keep, GroupPtr group,
                              const GlooCall& call, double timeout_s) {
  const std::lock_guard lock(mutex_);
  orphans_.push_back({std::move(keep), std::move(messages), std::move(group), call, timeout_s});
  if (!finisher_.joinable()) {
    const SignalsBlocked signals;
    finisher_ = std::thread([this] { finish_orphans(); });
  }
  changed_.notify_all();
}

void GlooFabric::finish_orphans() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return no_more_orphans_ || !orphans_.empty(); });
    if (orphans_.empty()) return;
    Orphan orphan = std::move(orphans_.front());
    orphans_.pop_front();
    lock.unlock();
    try {
      for (GlooMessage& message : orphan.messages) wait(message, orphan.group, orphan.call, orphan.timeout_s);
    } catch (const CommunicationError&) {
      // The fabric has failed; every later call says so.
    }
    orphan.messages.clear();
    orphan = {};
    lock.lock();
  }
}

}  // namespace tessera
