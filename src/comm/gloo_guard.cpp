/// The part of GlooFabric that finds out what went wrong, and tells.
///
/// Reports travel through the store as numbered events, which every guard reads in order: "E rank reason"
/// ends all ranks with that reason; "Q group sequence" asks every rank what it has called on a group, which
/// is how a rank at its deadline learns who is missing; "H rank" renews deadlines, as a rank that has much to
/// do gets on with it. One such event a quarter of the deadline is enough for all ranks that are at work.

#include <algorithm>
#include <charconv>
#include <sstream>

#include "comm/gloo_fabric.hpp"
#include "comm/gloo_signals.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/timeout.hpp"

namespace tessera {

using store::after;
using store::Clock;
using store::Deadline;

namespace {

constexpr double kStoreTimeout = 2;   // for each request of the guard
constexpr double kEventTimeout = 5;   // to say something to all ranks
constexpr int kStoreTries = 2;        // late answers in a row after which the store counts as gone
constexpr double kAnswerGrace = 3;    // for other ranks, on busy machines, to say what they have called
constexpr double kOwnErrorGrace = 1;  // for a lost rank's own last words
constexpr double kGoodbyeTimeout = 1;

/// The first few of many ranks.
class Findings {
 public:
  template <typename... Parts>
  void add(const Parts&... parts) {
    constexpr int kMostShown = 8;
    if (++count_ <= kMostShown) text_ += detail::concat(count_ == 1 ? "" : "; ", parts...);
    more_ = std::max(0, count_ - kMostShown);
  }
  bool empty() const { return count_ == 0; }
  std::string text() const { return more_ == 0 ? text_ : detail::concat(text_, "; so ", more_, " more"); }

 private:
  std::string text_;
  int count_ = 0, more_ = 0;
};

/// Puts an event where every guard finds it in its turn; returns its number. Patient: nobody hears what comes
/// after a number that was taken, and under which nothing is said.
std::int64_t say(Store& store, const std::string& job, const std::string& event) {
  const std::int64_t number = store.add(job + "/events", 1, kEventTimeout);
  store.set(detail::concat(job, "/event/", number), event, kEventTimeout);
  return number;
}

double seconds_until(Deadline deadline) {
  return std::chrono::duration<double>(deadline - Clock::now()).count();
}

}  // namespace

template <typename Work>
bool GlooFabric::with_store(Work&& work) {
  if (!store_alive_) return false;
  try {
    work(*store_);
    store_late_ = 0;
    return true;
  } catch (const CommunicationTimeout&) {
    store_alive_ = ++store_late_ < kStoreTries;  // a busy machine; or it hangs
  } catch (const std::exception&) {
    store_alive_ = false;  // its process has ended
  }
  return false;
}

void GlooFabric::guard() {
  for (;;) {
    Deadline wake;
    std::set<int> lost;
    std::optional<Wait> late;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_ && (!failed_ || closed_)) return;
      wake_ = after(3600);
      for (Wait& wait : waits_) {
        renew(wait);
        if (wait.deadline <= Clock::now() && !late) late = wait;
        wake_ = std::min(wake_, wait.deadline);
      }
      wake = wake_;
      lost = lost_;
    }
    if (failed_ && !closed_) {
      publish_failure();
      close_connections();
    } else if (!failed_ && !lost.empty()) {
      explain_loss(*lost.begin());
    } else if (!failed_ && late) {
      explain_deadline(*late);
    } else if (!failed_ && heartbeat_due_.exchange(false)) {
      publish_heartbeat();
    } else {
      listen(wake);
    }
  }
}

void GlooFabric::listen(Deadline deadline) {
  std::string event;
  bool came = false;
  if (!failed_) {
    with_store([&](Store& store) {
      came = store.wait_for(key("event/" + std::to_string(next_event_)), event, seconds_until(deadline),
                            interrupt_);
    });
  }
  if (came) {
    ++next_event_;
    handle_event(event);
    return;
  }
  interrupt_.wait(!failed_ && store_alive_ ? 0 : seconds_until(deadline));
}

void GlooFabric::handle_event(const std::string& event) {
  std::istringstream words(event);
  char kind = 0;
  words >> kind;
  if (kind == 'E') {
    int rank = 0;
    words >> rank;
    std::string reason;
    std::getline(words.ignore(1), reason, '\0');
    if (rank == rank_) return;
    set_failure(reason, Origin::elsewhere);
  } else if (kind == 'H') {
    heartbeat_ = heartbeat_told_ = Clock::now();
  } else if (kind == 'Q') {
    std::uint64_t group = 0, sequence = 0;
    words >> group >> sequence;
    with_store([&](Store& store) {
      const std::string query = std::to_string(next_event_ - 1);
      store.set(key(detail::concat("status/", query, "/", rank_)), status(group, sequence), kStoreTimeout);
      store.add(key("answers/" + query), 1, kStoreTimeout);
    });
  }
}

std::string GlooFabric::status(std::uint64_t id, std::uint64_t sequence) const {
  std::uint64_t collectives = 0;
  std::string same;
  std::pair<Deadline, std::string> latest{Deadline::min(), ""};
  const std::lock_guard lock(mutex_);
  for (const auto& entry : groups_) {
    const auto group = entry.lock();
    if (!group) continue;
    latest = std::max(latest, group->latest());
    if (group->id != id) continue;
    collectives = group->collectives();
    same = group->collective(sequence);
  }
  return detail::concat(collectives, "\n", same, "\n", latest.second);
}

void GlooFabric::publish_failure() {
  std::string reason;
  Origin origin = Origin::here;
  {
    const std::lock_guard lock(mutex_);
    if (published_ || origin_ == Origin::elsewhere) return;
    published_ = true;
    reason = reason_;
    origin = origin_;
  }
  with_store([&](Store& store) {
    if (origin == Origin::unwinding)
      return store.set(key(detail::concat("left/", rank_)), reason, kStoreTimeout);
    std::string known;
    const std::string own = error_key(job_, rank_);
    if (!store.try_get(own, known, kStoreTimeout)) store.set(own, reason, kStoreTimeout);
    say(store, job_, detail::concat("E ", rank_, " ", reason));
  });
}

void GlooFabric::heartbeat() {
  const Deadline now = Clock::now();
  heartbeat_ = now;
  if (heartbeat_told_.load() > now - std::chrono::duration<double>(heartbeat_period_s_)) return;
  if (!heartbeat_due_.exchange(true)) interrupt_.raise();
}

void GlooFabric::publish_heartbeat() {
  heartbeat_told_ = Clock::now();
  with_store([&](Store& store) {
    const std::int64_t number = store.add(key("events"), 1, kStoreTimeout);
    store.set(key("event/" + std::to_string(number)), detail::concat("H ", rank_), kStoreTimeout);
  });
}

void GlooFabric::renew(Wait& wait) const {
  const Deadline beat = heartbeat_;
  if (beat != Deadline::min())
    wait.deadline = std::max(wait.deadline, after(wait.timeout_s) - (Clock::now() - beat));
}

void GlooFabric::explain_loss(int peer) {
  const auto hear_others = [&] {
    for (std::int64_t before = -1; before != next_event_ && !failed_ && store_alive_;) {
      before = next_event_;
      listen(after(0));
    }
    return failed_.load();
  };
  if (hear_others()) return;
  std::string own_words;
  with_store([&](Store& store) { store.wait_for(error_key(job_, peer), own_words, kOwnErrorGrace, never_); });
  if (hear_others()) return;
  const std::string name = name_of(peer);
  if (!own_words.empty()) return fail(detail::concat(own_words, " (", name, " ended with this)"));
  std::string last =
      has_left(peer) ? name + " has ended its part in the job" : "lost the connection to " + name;
  with_store([&](Store& store) { store.try_get(key(detail::concat("left/", peer)), last, kStoreTimeout); });
  fail(last);
}

void GlooFabric::explain_deadline(const Wait& wait) {
  std::int64_t query = 0;
  with_store([&](Store& store) {
    query = say(store, job_, detail::concat("Q ", wait.group->id, " ", wait.call.sequence));
  });
  std::string answers;
  for (const Deadline end = after(kAnswerGrace); !failed_ && store_alive_ && Clock::now() < end;) {
    listen(std::min(end, after(kAnswerGrace / 10)));
    with_store([&](Store& store) {
      store.try_get(key("answers/" + std::to_string(query)), answers, kStoreTimeout);
    });
    if (answers == std::to_string(size_)) break;
  }
  if (failed_) return;
  const std::string missing = who_is_missing(wait, query);
  {
    const std::lock_guard lock(mutex_);
    const auto same = [&](Wait& other) {
      if (other.number != wait.number) return false;
      renew(other);
      return other.deadline == wait.deadline;
    };
    // It came after all, somebody is at work, or there is a better reason.
    if (std::none_of(waits_.begin(), waits_.end(), same) || !lost_.empty()) return;
  }
  set_failure(detail::concat(wait.group->describe(wait.call), " did not finish within ", wait.timeout_s,
                             " s on ", name_of(rank_), ": ", missing),
              Origin::late);
}

std::string GlooFabric::who_is_missing(const Wait& wait, std::int64_t query) {
  Findings absent, present;
  const auto& members = wait.group->ranks;
  for (int rank = 0; rank < size_ && store_alive_; ++rank) {
    std::string answer;
    with_store([&](Store& store) {
      store.try_get(key(detail::concat("status/", query, "/", rank)), answer, kStoreTimeout);
    });
    if (!store_alive_ || rank == rank_) continue;
    if (answer.empty()) {
      // Asked of all ranks of the job: a member may wait for one that this group does not know.
      absent.add(name_of(rank), has_left(rank) ? " has ended its part in the job" : " does not answer");
      continue;
    }
    if (std::find(members.begin(), members.end(), rank) == members.end()) continue;
    std::istringstream lines(answer);
    std::uint64_t collectives = 0;
    std::string same, latest;
    lines >> collectives;
    std::getline(lines.ignore(1), same);
    std::getline(lines, latest);
    const std::string last = latest.empty() ? ", it has called nothing yet" : ", its last call is " + latest;
    if (wait.call.collective && collectives <= wait.call.sequence) {
      absent.add(name_of(rank), " has not called it", last);
    } else if (wait.call.collective) {
      present.add(name_of(rank), " called ", same.empty() ? "later ones" : same);
    } else if (rank == wait.peer) {
      absent.add(name_of(rank), " has no message to match it", last);
    }
  }
  // Those that are here count only where nobody is missing: then the calls do not match.
  if (!absent.empty()) return absent.text();
  if (!present.empty()) return present.text();
  return detail::concat("nothing was ", wait.kind == GlooMessage::Kind::send ? "taken by " : "sent by ",
                        name_of(wait.peer), store_alive_ ? "" : ", and the job's store does not answer");
}

bool GlooFabric::has_left(int rank) const { return goodbyes_[static_cast<std::size_t>(rank)] != 0; }

/// Gloo ends this wait when any connection breaks, unless its other end had said goodbye before.
void GlooFabric::watch_connections() {
  for (;;) {
    try {
      const bool said_goodbye = goodbye_buffer_->waitRecv(std::chrono::hours(24 * 365));
      const std::lock_guard lock(mutex_);
      if (!said_goodbye && stopping_) return;
    } catch (const std::exception&) {
      break;
    }
  }
  if (failed_) return;
  // Gloo does not say which: a broken connection takes no more messages.
  const auto probe = context_->createUnboundBuffer(nullptr, 0);
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || has_left(peer)) continue;
    try {
      probe->recv(peer, gloo_slot({0, static_cast<std::uint64_t>(peer)}), 0, 0);
    } catch (const std::exception&) {
      lost_.insert(peer);
    }
  }
  interrupt_.raise();
}

void GlooFabric::say_goodbye() {
  char word = 1;
  const auto buffer = context_->createUnboundBuffer(&word, 1);
  const PipeSignalBlocked signal;
  int sent = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || has_left(peer)) continue;
    try {
      buffer->send(peer, kGoodbyeSlot, 0, 1);
      ++sent;
    } catch (const std::exception&) {
      // It is gone already.
    }
  }
  const Deadline deadline = after(kGoodbyeTimeout);
  try {
    for (; sent > 0; --sent) buffer->waitSend(std::chrono::milliseconds(store::milliseconds_until(deadline)));
  } catch (const std::exception&) {
    // A peer that takes nothing will learn it by the end of the connection.
  }
}

/// Gloo closes all connections, and ends what waits for them, when any wait times out.
void GlooFabric::close_connections() {
  try {
    context_->createUnboundBuffer(nullptr, 0)->waitRecv(std::chrono::milliseconds(1));
  } catch (const std::exception&) {
    // It says that it timed out.
  }
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace tessera
