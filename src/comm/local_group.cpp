#include <algorithm>
#include <thread>

#include "comm/check.hpp"
#include "comm/local.hpp"

namespace tessera {
namespace {

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

std::vector<int> LocalCollective::missing() const {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (!calls[r].arrived) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

LocalGroup::Clock::duration LocalGroup::duration_of(double seconds) {
  constexpr double kLongest = 1e9;  // far below what the clock's type holds
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest)));
}

double LocalGroup::seconds_of(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

LocalGroup::LocalGroup(std::string name, std::vector<int> ranks, const CommOptions& options)
    : name_(std::move(name)), ranks_(std::move(ranks)), options_(options) {}

std::string LocalGroup::describe(const Request& what) const {
  return detail::concat(LocalCommunicator::name_of(what.operation), " ", what.sequence, " on group ", name_,
                        " (", list(ranks_), ") at ", place_of(what.where));
}

void LocalGroup::check_alive() const { TESSERA_ENSURE(CommunicationError, !aborted_, reason_); }

std::shared_ptr<LocalCollective> LocalGroup::enter(std::uint64_t sequence) {
  const Lock lock(mutex_);
  check_alive();
  auto& work = collectives_[sequence];
  if (!work) work = std::make_shared<LocalCollective>(size());
  return work;
}

void LocalGroup::post(const std::shared_ptr<LocalCollective>& work, int rank, LocalCollective::Call call) {
  const std::uint64_t sequence = call.request.sequence;
  {
    const Lock lock(mutex_);
    if (aborted_) return;
    call.arrived = true;
    work->calls[static_cast<std::size_t>(rank)] = std::move(call);
    if (++work->arrived < size()) return;
    collectives_.erase(sequence);
    work->copying = 1;
  }
  const auto ready = Clock::now() + duration_of(options_.delay_s);
  std::string error = execute(*work, ready);
  for (LocalCollective::Call& of_rank : work->calls) of_rank.request = {};  // lets go of the tensors
  const Lock lock(mutex_);
  work->error = std::move(error);
  work->ready = ready;
  work->copying = 0;
  work->done = true;
  work->changed.notify_all();
}

/// An error is returned, not thrown: every rank is told, not only the one that came last.
std::string LocalGroup::execute(LocalCollective& work, Clock::time_point ready) {
  try {
    std::vector<CallSignature> signatures;
    for (const auto& call : work.calls) signatures.push_back(LocalCommunicator::signature_of(call.request));
    const Request& any = work.calls.front().request;
    std::string error = find_mismatch(signatures, ranks_, name_, any.sequence);
    if (!error.empty()) return error;
    if (any.operation == LocalCommunicator::Operation::split) {
      divide(work);
    } else {
      run_local_collective(work.calls);
    }
    const auto end = std::max(Clock::now(), ready);
    for (const auto& call : work.calls) {
      if (call.request.finished) call.request.finished(seconds_of(end));
    }
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

void LocalGroup::divide(LocalCollective& work) {
  auto& calls = work.calls;
  std::map<int, std::vector<int>> by_color;
  for (int r = 0; r < size(); ++r) {
    const int color = calls[static_cast<std::size_t>(r)].color;
    if (color >= 0) by_color[color].push_back(r);
  }
  for (auto& [color, members] : by_color) {
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
      return calls[static_cast<std::size_t>(a)].key < calls[static_cast<std::size_t>(b)].key;
    });
    std::vector<int> ranks;
    for (const int member : members) ranks.push_back(ranks_[static_cast<std::size_t>(member)]);
    const auto& name = calls[static_cast<std::size_t>(members.front())].name;
    const auto group = std::make_shared<LocalGroup>(name, std::move(ranks), options_);
    group->parent_ = shared_from_this();
    for (std::size_t i = 0; i < members.size(); ++i) {
      auto& call = calls[static_cast<std::size_t>(members[i])];
      call.group = group;
      call.rank = static_cast<int>(i);
    }
    Lock lock(mutex_);
    std::erase_if(children_, [](const auto& child) { return child.expired(); });
    children_.push_back(group);
    const bool dead = aborted_;
    const std::string reason = reason_;
    lock.unlock();
    if (dead) group->abort(reason);
  }
}

void LocalGroup::wait(LocalWork& work, const Request& what) {
  Lock lock(mutex_);
  const auto timeout = duration_of(options_.timeout_s);
  auto deadline = Clock::now() + timeout;
  while (!work.done) {
    if (work.copying > 0) {  // over soon; until then the tensors are in use
      work.changed.wait(lock);
      continue;
    }
    TESSERA_ENSURE(CommunicationError, !aborted_, reason_, " (", describe(what), " was waiting)");
    if (Clock::now() >= deadline) {
      const Clock::time_point beat = last_heartbeat();
      if (beat > deadline - timeout) {
        deadline = beat + timeout;
        continue;
      }
      std::vector<int> missing;
      for (const int rank : work.missing()) missing.push_back(ranks_[static_cast<std::size_t>(rank)]);
      std::sort(missing.begin(), missing.end());
      missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
      const std::string message = detail::concat(describe(what), ": ", list(missing), " did not come within ",
                                                 options_.timeout_s, " s");
      abort(lock, message);
      throw CommunicationError(message);
    }
    work.changed.wait_until(lock, deadline);
  }
  if (!work.error.empty()) throw CommunicationError(work.error);
  const auto ready = work.ready;
  lock.unlock();
  if (Clock::now() < ready) std::this_thread::sleep_until(ready);
}

bool LocalGroup::done(const LocalWork& work) const {
  const Lock lock(mutex_);
  if (work.done) return !work.error.empty() || Clock::now() >= work.ready;
  return aborted_ && work.copying == 0;
}

void LocalGroup::abort(const std::string& reason) {
  Lock lock(mutex_);
  abort(lock, reason);
}

void LocalGroup::heartbeat() { first_group().heartbeat_ = Clock::now(); }

LocalGroup::Clock::time_point LocalGroup::last_heartbeat() { return first_group().heartbeat_; }

std::string LocalGroup::failure() const {
  const Lock lock(mutex_);
  return reason_;
}

void LocalGroup::set_timeout(double seconds) {
  const Lock lock(mutex_);
  options_.timeout_s = seconds;
}

/// Unlocks: tensors are released and other groups are locked without holding the mutex.
void LocalGroup::abort(Lock& lock, const std::string& reason) {
  if (aborted_) return lock.unlock();
  aborted_ = true;
  reason_ = reason;
  const auto collectives = std::move(collectives_);
  const auto channels = std::move(channels_);
  const auto children = children_;
  collectives_.clear();
  channels_.clear();
  for (const auto& [sequence, work] : collectives) work->changed.notify_all();
  for (const auto& [key, channel] : channels) {
    for (const Receive& receive : channel.receives) receive.work->changed.notify_all();
  }
  lock.unlock();
  for (const auto& child : children) {
    if (const auto group = child.lock()) group->abort(reason);
  }
}

}  // namespace tessera
