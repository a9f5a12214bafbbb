#pragma once
/// What all Gloo communicators of one rank share: a connection to every other rank, messages over it, and the
/// knowledge of what went wrong. Three threads serve it: Gloo's own, which moves the bytes; one that notices
/// lost connections; the guard, which watches deadlines and what other ranks report through the store.

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/store_wire.hpp"
#include "tessera/comm/gloo.hpp"

namespace tessera {

/// One call of a communicator, as messages name it.
struct GlooCall {
  const char* operation = "";
  bool collective = true;
  std::uint64_t sequence = 0;
  Communicator::Where where;
};

/// The ranks of a communicator and what this process has called on it.
class GlooGroup {
 public:
  GlooGroup(std::uint64_t id, std::string name, std::vector<int> ranks)
      : id(id), name(std::move(name)), ranks(std::move(ranks)) {}

  const std::uint64_t id;  ///< the same on every member, different for groups with ranks in common
  const std::string name;
  const std::vector<int> ranks;  ///< numbers in the job, by rank in the group

  void called(const GlooCall& call);
  /// How many collectives have been called.
  std::uint64_t collectives() const;
  /// Collective number `sequence`, in words; empty if it is not among the last few.
  std::string collective(std::uint64_t sequence) const;
  /// When the last call was made, and which; "" if there was none.
  std::pair<store::Deadline, std::string> latest() const;
  /// "all_reduce 3 on group tp (ranks 0, 1) at file.cpp:12".
  std::string describe(const GlooCall& call) const;

 private:
  mutable std::mutex mutex_;
  std::uint64_t collectives_ = 0;
  std::array<GlooCall, 16> recent_;
  GlooCall latest_;
  store::Deadline latest_time_{};
};

/// A message under way. Its memory must stay as long as this. Until the fabric has failed, it is not
/// destroyed before it was waited for.
struct GlooMessage {
  enum class Kind { send, recv };
  Kind kind = Kind::send;
  int peer = 0;  ///< rank in the job
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
};

/// Which message goes where: both ends compute the same number. Contains the size, so that ends that disagree
/// about it wait for their deadline rather than write past a buffer.
std::uint64_t gloo_slot(std::initializer_list<std::uint64_t> parts);

class GlooFabric {
 public:
  using GroupPtr = std::shared_ptr<const GlooGroup>;
  /// Collective over all ranks. Errors: CommunicationError, IoError.
  GlooFabric(std::shared_ptr<Store> store, int rank, int size, const GlooOptions& options);
  /// Leaves, and closes the connections.
  ~GlooFabric();
  GlooFabric(const GlooFabric&) = delete;
  GlooFabric& operator=(const GlooFabric&) = delete;

  int rank() const { return rank_; }
  void add_group(const std::shared_ptr<GlooGroup>& group);
  /// Of a collective in some communicator's queue.
  void call_queued();
  void call_finished();
  /// Communicator::leave. Waits for the queues; does nothing the second time.
  void leave();

  /// Starts a message; never blocks. Errors: CommunicationError once the fabric has failed.
  GlooMessage post(GlooMessage::Kind kind, int peer, std::uint64_t slot, void* data, std::size_t bytes,
                   const GroupPtr& group, const GlooCall& call);
  /// Blocks until done. Errors: CommunicationError when a rank was lost, or at the deadline. On a `caller`'s
  /// own thread also what while_waiting throws.
  void wait(GlooMessage& message, const GroupPtr& group, const GlooCall& call, double timeout_s,
            bool caller = false);
  const WhileWaiting& while_waiting() const { return while_waiting_; }
  /// Calls while_waiting; what it throws is told to the others first.
  void call_while_waiting();

  /// Ends all waits here and, through the guard, everywhere else. The first reason stays. Never blocks.
  void fail(const std::string& reason);
  /// This rank is being unwound by an exception: ends all waits here and closes the connections. The others
  /// are left to find out, as the exception's own text is still to be told (error_key).
  void give_up();
  /// As in Heartbeats.
  void heartbeat();
  store::Deadline last_heartbeat() const { return heartbeat_; }
  bool failed() const { return failed_; }
  /// The reason; empty unless failed.
  std::string failure() const;
  /// Throws if failed: the reason, and what was waiting.
  void check(const GroupPtr& group, const GlooCall& call) const;
  /// Waits for messages that nobody else waits for, in a thread of its own; `keep` lives until then.
  void finish_alone(std::vector<GlooMessage> messages, std::shared_ptr<void> keep, GroupPtr group,
                    const GlooCall& call, double timeout_s);

 private:
  enum class Origin { here, late, elsewhere, unwinding };
  struct Wait {
    std::uint64_t number;
    gloo::transport::UnboundBuffer* buffer;
    GlooMessage::Kind kind;
    int peer;
    std::shared_ptr<const GlooGroup> group;
    GlooCall call;
    double timeout_s;
    store::Deadline deadline;
    bool caller;
  };
  using Waits = std::list<Wait>;

  void connect(const GlooOptions& options);
  void exchange_names(double timeout_s);
  /// "rank 3 (host node-b, process 1234)".
  std::string name_of(int rank) const;
  bool has_left(int rank) const;
  void watch_connections();
  void finish_orphans();
  void rouse_callers();
  void say_goodbye();
  void stop();
  void close_connections();

  /// A connection is broken: the guard finds out why. Blocks until it has.
  void lost(int peer);
  [[noreturn]] void throw_failure(const GroupPtr& group, const GlooCall& call) const;
  /// Sets the reason, ends all waits. False if there was one before.
  bool set_failure(const std::string& reason, Origin origin);

  void guard();
  /// Waits for what others report, an interrupt or the deadline, and acts on a report.
  void listen(store::Deadline deadline);
  void handle_event(const std::string& event);
  void publish_failure();
  /// Tells the other ranks of this one's heartbeats, as of the last one.
  void publish_heartbeat();
  /// Puts off a deadline that was renewed by a heartbeat since the wait began. Holds the mutex.
  void renew(Wait& wait) const;
  void explain_loss(int peer);
  void explain_deadline(const Wait& wait);
  std::string who_is_missing(const Wait& wait, std::int64_t query);
  /// What this rank has called on a group, for a rank that waits there.
  std::string status(std::uint64_t group, std::uint64_t sequence) const;
  /// False if it did not work. A store that is gone is not asked again; one that is slow is.
  template <typename Work>
  bool with_store(Work&& work);
  std::string key(const std::string& name) const { return job_ + "/" + name; }

  std::shared_ptr<Store> store_;  // until this rank has left
  const int rank_, size_;
  const std::string job_;
  static constexpr std::uint64_t kGoodbyeSlot = 1;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<std::array<char, 128>> names_;

  std::vector<char> goodbyes_;  // byte r: rank r has said goodbye
  std::unique_ptr<gloo::transport::UnboundBuffer> goodbye_buffer_;
  const WhileWaiting while_waiting_;
  std::thread watcher_, guard_, finisher_, rouser_;
  Interrupt interrupt_, never_;
  double heartbeat_period_s_ = 0;  // least time between two that others hear
  std::atomic<store::Deadline> heartbeat_ = store::Deadline::min();       // the last one, of any rank
  std::atomic<store::Deadline> heartbeat_told_ = store::Deadline::min();  // the last one that all ranks heard
  std::atomic<bool> heartbeat_due_ = false;                               // one that others should hear
  std::int64_t next_event_ = 1;                                           // guard only
  bool store_alive_ = true;                                               // guard only
  int store_late_ = 0;                                                    // guard only

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> failed_ = false;
  std::string reason_;
  Origin origin_ = Origin::here;
  bool published_ = false, closed_ = false, stopping_ = false;
  Waits waits_;
  std::uint64_t next_wait_ = 0;
  struct Orphan;
  std::list<Orphan> orphans_;
  /// libgloo signals a buffer's condition variable after it has released its mutex, so the waiter may be gone
  /// by then: finished buffers stay for a while.
  std::deque<std::unique_ptr<gloo::transport::UnboundBuffer>> finished_;
  bool no_more_orphans_ = false;
  int calls_ = 0;  // queued or running
  bool left_ = false;
  store::Deadline wake_ = store::Deadline::max();  // when the guard looks at the deadlines next
  std::set<int> lost_;
  std::vector<std::weak_ptr<GlooGroup>> groups_;
};

}  // namespace tessera
