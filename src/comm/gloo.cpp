#include "tessera/comm/gloo.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <thread>

#include "comm/check.hpp"
#include "comm/gloo_collectives.hpp"
#include "comm/gloo_fabric.hpp"
#include "comm/gloo_signals.hpp"
#include "comm/heartbeats.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

namespace {

/// A collective in the queue of its communicator's thread, which keeps the deadline.
class QueuedCall : public Pending::State {
 public:
  explicit QueuedCall(std::shared_ptr<GlooFabric> fabric) : fabric_(std::move(fabric)) {}
  void wait(const ExecCtx&) override { wait(); }
  void wait() {
    std::unique_lock lock(mutex_);
    const auto over = [&] { return done_; };
    if (fabric_->while_waiting()) {
      std::exception_ptr interrupted;
      while (!changed_.wait_for(lock, std::chrono::duration<double>(kWhileWaiting), over)) {
        if (interrupted) continue;  // the communicator's thread still uses the caller's memory
        lock.unlock();
        try {
          fabric_->call_while_waiting();
        } catch (...) {
          interrupted = std::current_exception();
        }
        lock.lock();
      }
      if (interrupted) std::rethrow_exception(interrupted);
    }
    changed_.wait(lock, over);
    if (error_) std::rethrow_exception(error_);
  }
  bool done() const override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void finish(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  const std::shared_ptr<GlooFabric> fabric_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

/// A batch of messages under way. Whoever waits first waits for the messages themselves; so a batch that must
/// wait for another rank holds up no other.
class PostedExchange : public Pending::State {
 public:
  PostedExchange(std::shared_ptr<GlooFabric> fabric, GlooFabric::GroupPtr group, const GlooCall& call,
                 double timeout_s)
      : fabric_(std::move(fabric)), group_(std::move(group)), call_(call), timeout_s_(timeout_s) {}

  /// A batch nobody waited for still needs its memory.
  ~PostedExchange() override {
    if (stage_ != Stage::posted || fabric_->failed()) return;
    auto keep = std::make_shared<std::vector<Transfer>>(std::move(transfers_));
    fabric_->finish_alone(std::move(messages_), std::move(keep), group_, call_, timeout_s_);
  }

  void post(std::vector<Transfer> transfers, std::function<void(double)> finished) {
    transfers_ = std::move(transfers);
    finished_ = std::move(finished);
    for (const Transfer& transfer : transfers_) {
      const auto kind =
          transfer.kind == Transfer::Kind::send ? GlooMessage::Kind::send : GlooMessage::Kind::recv;
      constexpr std::uint64_t kExchange = 100;  // apart from the collectives' phases
      const std::size_t bytes = transfer.tensor.nbytes();
      const std::uint64_t slot = gloo_slot({group_->id, kExchange, transfer.tag, bytes});
      const int peer = group_->ranks[static_cast<std::size_t>(transfer.peer)];
      messages_.push_back(fabric_->post(kind, peer, slot, transfer.tensor.raw(), bytes, group_, call_));
    }
    stage_ = Stage::posted;
  }

  void wait(const ExecCtx&) override { wait(); }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stage_ != Stage::waiting; });
    if (stage_ == Stage::posted) {
      stage_ = Stage::waiting;
      lock.unlock();
      std::exception_ptr error;
      try {
        for (GlooMessage& message : messages_) fabric_->wait(message, group_, call_, timeout_s_, true);
      } catch (...) {
        error = std::current_exception();
      }
      messages_.clear();
      transfers_.clear();
      if (!error && finished_) finished_(now_s());
      lock.lock();
      stage_ = Stage::finished;
      error_ = error;
      changed_.notify_all();
    }
    if (error_) std::rethrow_exception(error_);
  }

  bool done() const override {
    const std::lock_guard lock(mutex_);
    return stage_ == Stage::finished;
  }

 private:
  enum class Stage { empty, posted, waiting, finished };

  std::shared_ptr<GlooFabric> fabric_;
  GlooFabric::GroupPtr group_;
  GlooCall call_;
  double timeout_s_;
  std::vector<Transfer> transfers_;
  std::vector<GlooMessage> messages_;  // destroyed before the tensors
  std::function<void(double)> finished_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Stage stage_ = Stage::empty;
  std::exception_ptr error_;
};

class GlooCommunicator : public Communicator, public Heartbeats {
 public:
  GlooCommunicator(std::shared_ptr<GlooFabric> fabric, std::shared_ptr<GlooGroup> group, int rank,
                   CommOptions options)
      : Communicator(rank, static_cast<int>(group->ranks.size()), group->name, std::move(options)),
        fabric_(std::move(fabric)),
        group_(std::move(group)) {
    fabric_->add_group(group_);
  }

  /// What was called is finished first, as the other ranks count on it, unless this rank is giving up.
  ~GlooCommunicator() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      if (std::uncaught_exceptions() > 0 && (busy_ || !queue_.empty())) fabric_->give_up();
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  void abort(const std::string& reason) override { fabric_->fail(reason); }
  void leave() override { fabric_->leave(); }
  void heartbeat() override { fabric_->heartbeat(); }
  std::chrono::steady_clock::time_point last_heartbeat() const override { return fabric_->last_heartbeat(); }
  std::string failure() const override { return fabric_->failure(); }
  std::vector<int> members() const override { return group_->ranks; }

 protected:
  Pending start(const ExecCtx& ctx, Request request) override {
    if (request.operation == Operation::exchange) return start_exchange(ctx, std::move(request));
    Event ready;
    ctx.stream->record(ready);
    return Pending(enqueue(std::move(request), ready, nullptr));
  }

  std::shared_ptr<Communicator> do_split(int color, int key, const std::string& name, std::uint64_t sequence,
                                         const Where& where) override {
    Request request;
    request.operation = Operation::split;
    request.sequence = sequence;
    request.where = where;
    std::vector<std::string> texts{detail::concat(color, " ", key)};
    enqueue(std::move(request), {}, &texts)->wait();
    std::vector<std::pair<int, int>> members;  // key, rank
    for (int r = 0; r < size(); ++r) {
      std::istringstream text(texts[static_cast<std::size_t>(r)]);
      int other_color = 0, other_key = 0;
      text >> other_color >> other_key;
      if (other_color == color) members.emplace_back(other_key, r);
    }
    if (color < 0) return nullptr;
    std::sort(members.begin(), members.end());
    std::vector<int> ranks;
    int own = 0;
    for (const auto& [order, r] : members) {
      if (r == rank()) own = static_cast<int>(ranks.size());
      ranks.push_back(group_->ranks[static_cast<std::size_t>(r)]);
    }
    const std::uint64_t id = gloo_slot({group_->id, sequence, static_cast<std::uint64_t>(color)});
    return std::make_shared<GlooCommunicator>(
        fabric_, std::make_shared<GlooGroup>(id, name, std::move(ranks)), own, options());
  }

 private:
  struct Call {
    Request request;
    Event ready;
    std::vector<std::string>* texts;  // split only: in, the own text; out, everybody's
    std::shared_ptr<QueuedCall> state;
  };

  GlooCall call_of(const Request& request) const {
    return {.operation = name_of(request.operation),
            .collective = request.operation != Operation::exchange,
            .sequence = request.sequence,
            .where = request.where};
  }

  Pending start_exchange(const ExecCtx& ctx, Request request) {
    // The messages go out from here, not in turn with the collectives: one that waits for a slow rank must
    // not hold up what that rank needs in order to go on.
    Event ready;
    ctx.stream->record(ready);
    ready.synchronize();
    const GlooCall call = call_of(request);
    group_->called(call);
    auto state = std::make_shared<PostedExchange>(fabric_, group_, call, options().timeout_s);
    if (request.started) request.started();
    state->post(std::move(request.transfers), std::move(request.finished));
    return Pending(std::move(state));
  }

  std::shared_ptr<QueuedCall> enqueue(Request request, const Event& ready, std::vector<std::string>* texts) {
    const GlooCall call = call_of(request);
    group_->called(call);
    fabric_->check(group_, call);
    auto state = std::make_shared<QueuedCall>(fabric_);
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(request), ready, texts, state});
    fabric_->call_queued();
    if (!thread_.joinable()) {
      const SignalsBlocked signals;
      thread_ = std::thread([this] { work(); });
    }
    changed_.notify_all();
    return state;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      busy_ = false;
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Call call = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        call.ready.synchronize();
        if (call.request.started) call.request.started();
        run(call);
        if (call.request.finished) call.request.finished(now_s());
      } catch (...) {
        error = std::current_exception();
      }
      call.request = {};  // the tensors are let go of before anybody is told
      call.state->finish(error);
      fabric_->call_finished();
      lock.lock();
    }
  }

  void run(Call& call) {
    const Request& request = call.request;
    GlooCollective collective(*fabric_, group_, rank(), call_of(request), options().timeout_s, scratch_);
    if (options().check) compare(collective, request);
    switch (request.operation) {
      case Operation::all_reduce:
        return collective.all_reduce(request.in, request.op);
      case Operation::reduce_scatter:
        return collective.reduce_scatter(request.in, request.out, request.send_counts, request.op);
      case Operation::all_gather:
        return collective.all_gather(request.in, request.out, request.recv_counts);
      case Operation::broadcast:
        return collective.broadcast(request.in, request.root);
      case Operation::all_to_all:
        return collective.all_to_all(request.in, request.out, request.send_counts, request.recv_counts);
      case Operation::split:
        *call.texts = collective.gather_texts(call.texts->front());
        return;
      case Operation::barrier:
      case Operation::exchange:
        return collective.barrier();
    }
  }

  /// Every rank finds the same mismatch by itself.
  void compare(GlooCollective& collective, const Request& request) {
    std::vector<CallSignature> calls;
    for (const std::string& text : collective.gather_texts(signature_of(request).encode()))
      calls.push_back(CallSignature::decode(text));
    const std::string mismatch = find_mismatch(calls, group_->ranks, name(), request.sequence);
    if (mismatch.empty()) return;
    fabric_->fail(mismatch);
    throw CommunicationError(mismatch);
  }

  std::shared_ptr<GlooFabric> fabric_;
  std::shared_ptr<GlooGroup> group_;
  std::vector<std::byte> scratch_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> queue_;
  bool busy_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Store> store, int rank, int size,
                                                     const GlooOptions& options) {
  TESSERA_CHECK(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of ", size);
  TESSERA_CHECK(store != nullptr, "a communicator over Gloo needs a store");
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto fabric = std::make_shared<GlooFabric>(std::move(store), rank, size, options);
  auto group = std::make_shared<GlooGroup>(1, "world", std::move(ranks));
  return std::make_shared<GlooCommunicator>(std::move(fabric), std::move(group), rank, options.comm);
}

}  // namespace tessera
