#pragma once
/// Ranks as threads of one process. A collective is executed by the rank that comes last, a message by
/// whichever end comes second: no further threads, and starting an operation never waits for another rank.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "comm/heartbeats.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera {

class LocalGroup;

class LocalCommunicator : public Communicator, public Heartbeats {
 public:
  using Communicator::name_of;
  using Communicator::Operation;
  using Communicator::Request;
  using Communicator::signature_of;

  LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank, const std::string& name,
                    const CommOptions& options);
  void abort(const std::string& reason) override;
  void heartbeat() override;
  std::chrono::steady_clock::time_point last_heartbeat() const override;
  std::string failure() const override;
  std::vector<int> members() const override;

 protected:
  void set_timeout(double seconds) override;
  Pending start(const ExecCtx& ctx, Request request) override;
  std::shared_ptr<Communicator> do_split(int color, int key, const std::string& name, std::uint64_t sequence,
                                         const Where& where) override;

 private:
  std::shared_ptr<LocalGroup> group_;
};

/// What a rank waits for. Everything is guarded by the group's mutex.
struct LocalWork {
  virtual ~LocalWork() = default;
  /// Ranks (of the group) this waits for.
  virtual std::vector<int> missing() const = 0;

  std::condition_variable changed;
  bool done = false;
  int copying = 0;  ///< threads that use the tensors at the moment, without holding the mutex
  std::string error;
  std::chrono::steady_clock::time_point ready;  ///< waits last at least until then
};

/// One collective: all ranks' calls.
struct LocalCollective : LocalWork {
  struct Call {
    LocalCommunicator::Request request;
    int color = 0, key = 0;  ///< split
    std::string name;        ///< split
    bool arrived = false;
    std::shared_ptr<LocalGroup> group;  ///< result of a split, with the rank in it
    int rank = 0;
  };
  explicit LocalCollective(int size) : calls(static_cast<std::size_t>(size)) {}
  std::vector<int> missing() const override;

  std::vector<Call> calls;
  int arrived = 0;
};

/// One rank's batch of messages.
struct LocalExchange : LocalWork {
  std::vector<int> missing() const override { return awaited; }

  std::vector<int> awaited;  ///< senders of messages still to come, once for each
  bool posted = false;
  std::function<void(double)> finished;
};

/// What the ranks of one group share.
class LocalGroup : public std::enable_shared_from_this<LocalGroup> {
 public:
  using Clock = std::chrono::steady_clock;
  using Request = LocalCommunicator::Request;

  /// `ranks`: the members' ranks in the first group, by which messages name them.
  LocalGroup(std::string name, std::vector<int> ranks, const CommOptions& options);
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }

  /// The collective with this number. Errors: CommunicationError after abort.
  std::shared_ptr<LocalCollective> enter(std::uint64_t sequence);
  /// Hands in this rank's part and, as the last rank, executes the operation.
  void post(const std::shared_ptr<LocalCollective>& work, int rank, LocalCollective::Call call);

  /// Errors: CommunicationError after abort.
  std::shared_ptr<LocalExchange> enter_exchange(const Request& request);
  void post_exchange(const std::shared_ptr<LocalExchange>& work, int rank, const Request& request);

  /// `what`: the call that waits, for messages.
  void wait(LocalWork& work, const Request& what);
  bool done(const LocalWork& work) const;
  void abort(const std::string& reason);
  void heartbeat();
  Clock::time_point last_heartbeat();
  std::string failure() const;
  void set_timeout(double seconds);

 private:
  /// A message whose receiver has not asked for it yet.
  struct Message {
    std::vector<std::byte> bytes;
    DType dtype = DType::f32;
    std::int64_t count = 0;
    std::string where;
  };
  struct Receive {
    std::shared_ptr<LocalExchange> work;
    Tensor tensor;
    std::string where;
  };
  struct Channel {
    std::deque<Message> messages;
    std::deque<Receive> receives;
  };
  using ChannelKey = std::tuple<int, int, std::uint32_t>;  // source, destination, tag
  using Lock = std::unique_lock<std::mutex>;

  static Clock::duration duration_of(double seconds);
  static double seconds_of(Clock::time_point time);
  void send(int rank, const Transfer& transfer, const std::string& where);
  void receive(const std::shared_ptr<LocalExchange>& work, int rank, const Transfer& transfer,
               const std::string& where);
  void deliver(Lock& lock, const ChannelKey& key, const Message& message, const void* bytes, Receive receive);
  void complete_if_over(Lock& lock, const std::shared_ptr<LocalExchange>& work);
  std::string execute(LocalCollective& work, Clock::time_point ready);
  void divide(LocalCollective& work);
  std::string describe(const Request& what) const;
  void check_alive() const;
  /// The group that all others were split from.
  LocalGroup& first_group() { return parent_ ? parent_->first_group() : *this; }
  void abort(Lock& lock, const std::string& reason);

  const std::string name_;
  const std::vector<int> ranks_;
  CommOptions options_;
  mutable std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
  std::map<std::uint64_t, std::shared_ptr<LocalCollective>> collectives_;  // not all ranks are there yet
  std::map<ChannelKey, Channel> channels_;                                 // none is empty
  std::vector<std::weak_ptr<LocalGroup>> children_;                        // groups split from this one
  std::shared_ptr<LocalGroup> parent_;  // lives on, so that an abort finds the way from its parents here
  std::atomic<Clock::time_point> heartbeat_ = Clock::time_point::min();  // the last one; of the first group
};

/// Executes a collective on the tensors of all ranks (element r: rank r's call).
void run_local_collective(const std::vector<LocalCollective::Call>& calls);

}  // namespace tessera
