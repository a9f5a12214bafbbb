#pragma once
/// Communicator: a fixed group of ranks that exchange tensors. One interface for one rank (self), threads of
/// a process (local) and processes (gloo); what differs is behind it.
///
/// Every rank of a group calls the same collectives in the same order. An operation starts when it is called,
/// after the work launched on ctx.stream so far; its result is there after Pending::wait. Until then nobody
/// writes to its inputs or touches its outputs. Tensors are contiguous and are kept alive by the operation.
/// Sums of bf16 and fp16 are made in fp32 and rounded once; sums are made in rank order, so results repeat
/// bit for bit and are the same on every rank, on every kind of communicator but NCCL (see nccl.hpp).
/// reduce_scatter and all_reduce add in the same order.

#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

class FlightRecorder;
struct FlightOperation;

enum class ReduceOp { sum, max };

/// An operation under way; copies share it. Default constructed: done.
class Pending {
 public:
  class State {
   public:
    virtual ~State() = default;
    /// Pending::wait.
    virtual void wait(const ExecCtx& ctx) = 0;
    virtual bool done() const = 0;
  };
  Pending() = default;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// Orders ctx.stream after the operation; on the CPU that blocks the calling thread, on CUDA it does not.
  /// May be called again. Errors: CommunicationError when a rank was lost, did not come in time, or called
  /// something else. On CUDA what happens later is told by the next call, or by another wait after the stream
  /// was synchronised.
  void wait(const ExecCtx& ctx) const;
  bool done() const { return !state_ || state_->done(); }

 private:
  std::shared_ptr<State> state_;
};

/// One message of a batch. Messages between two ranks are matched by tag; equal tags in the order they were
/// posted. CUDA tensors over NCCL carry no tag: a rank posts its receives from another one in the order of
/// that one's sends, in which a batch counts as sorted by tag. CommOptions::check compares.
struct Transfer {
  enum class Kind { send, recv };
  Kind kind = Kind::send;
  Tensor tensor;
  int peer = 0;
  std::uint32_t tag = 0;
};

/// What one rank did on one communicator. Bytes are what leaves this rank for others, of n ranks:
/// reduce_scatter: `in` without its own block, (n-1)/n of it when blocks are alike; all_gather: n-1 times
/// `in`; all_reduce: both, over blocks part_of(count, rank, n); broadcast: the root n-1 times the tensor,
/// others nothing; all_to_all: `in` without its own block; exchange: the tensors sent.
struct CommStats {
  std::uint64_t operations = 0;  ///< calls, barriers and splits included; a batch of messages is one
  std::uint64_t bytes_sent = 0;
  double wait_s = 0;  ///< seconds Pending::wait held up the host or the stream: communication nothing hid
};

struct CommOptions {
  double timeout_s = 600;
  /// Ranks compare operation, shape and order before each operation; a mismatch is an error that names both
  /// callers.
  bool check = false;
  /// Hardware queues that CUDA made of this process's GPU (CUDA_DEVICE_MAX_CONNECTIONS); 0: its default, 8.
  int cuda_connections = 0;
  /// Every operation takes at least so long from its start (tests of overlap; local only).
  double delay_s = 0;
  std::shared_ptr<FlightRecorder> flight = {};  ///< Communicator::set_flight
};

struct CallSignature;  // src/comm/check.hpp

/// What is its own where a graph calls a recorded operation once more: Communicator::Request has what it is.
struct RepeatedCall {
  std::uint64_t sequence = 0;
  std::function<void(double end_s)> finished = {};  ///< Request::finished, which does not read the time
};

class Communicator {
 public:
  using Where = std::source_location;

  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// What the group is for, as messages name it: "world", "tp", "dp", ...
  const std::string& name() const { return name_; }
  const CommOptions& options() const { return options_; }
  /// The rank's flight recorder, told of every operation here and in groups that are split off from now on;
  /// null, the default: none. While nothing is under way.
  void set_flight(std::shared_ptr<FlightRecorder> flight) { options_.flight = std::move(flight); }
  const std::shared_ptr<FlightRecorder>& flight() const { return options_.flight; }
  /// The ranks of this group by their numbers in the first one; empty where nobody knows them.
  virtual std::vector<int> members() const { return {}; }

  /// In place. f32, f64, bf16, f16, i32, i64.
  Pending all_reduce(const ExecCtx& ctx, const Tensor& x, ReduceOp op = ReduceOp::sum,
                     const Where& where = Where::current());
  /// `in` is size() blocks one after the other; this rank gets the sum over ranks of block rank() in `out`.
  /// `counts`: elements of each block, empty = all alike. `out` may be the own block of `in`.
  Pending reduce_scatter(const ExecCtx& ctx, const Tensor& in, const Tensor& out,
                         std::span<const std::int64_t> counts = {}, ReduceOp op = ReduceOp::sum,
                         const Where& where = Where::current());
  /// `out` becomes every rank's `in`, one after the other. `in` may be the own block of `out`.
  Pending all_gather(const ExecCtx& ctx, const Tensor& in, const Tensor& out,
                     std::span<const std::int64_t> counts = {}, const Where& where = Where::current());
  Pending broadcast(const ExecCtx& ctx, const Tensor& x, int root, const Where& where = Where::current());
  /// Block r of `in` (send_counts[r] elements) goes to rank r; block r of `out` (recv_counts[r]) came from
  /// it.
  Pending all_to_all(const ExecCtx& ctx, const Tensor& in, const Tensor& out,
                     std::span<const std::int64_t> send_counts, std::span<const std::int64_t> recv_counts,
                     const Where& where = Where::current());
  /// Messages to and from single other ranks; only their two ends take part. All are started at once, so
  /// that two ranks may send to each other first.
  Pending exchange(const ExecCtx& ctx, std::vector<Transfer> transfers,
                   const Where& where = Where::current());
  Pending send(const ExecCtx& ctx, const Tensor& x, int peer, std::uint32_t tag = 0,
               const Where& where = Where::current());
  Pending recv(const ExecCtx& ctx, const Tensor& x, int peer, std::uint32_t tag = 0,
               const Where& where = Where::current());
  /// Makes what messages with these ranks need (a connection, memory, code), so that no first message has to.
  /// Blocks until each of them does the same with this one. Kinds that have it from the start do nothing.
  virtual void connect_to(std::span<const int> peers) { static_cast<void>(peers); }
  /// Blocks until every rank is here.
  void barrier(const ExecCtx& ctx, const Where& where = Where::current());

  /// Collective, blocks. Ranks that give one color form a new communicator with the options of this one, in
  /// the order of (key, rank); null for color < 0.
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name,
                                      const Where& where = Where::current());

  /// Ends every wait of this rank and of its peers, here and in groups made from this one by split, with a
  /// CommunicationError that begins with `reason`; later calls fail at once. The first reason stays. Never
  /// waits.
  virtual void abort(const std::string& reason) = 0;
  /// This rank takes part in nothing more, here and in groups made from this one or its parents by split:
  /// what was called is finished, the other processes are told, the threads that serve the connections end,
  /// and every later call fails. For a process that is about to end while others than the caller may hold its
  /// communicators: such threads must not run while the libraries below them are taken down. Gloo only; on
  /// the other kinds nothing happens.
  virtual void leave() {}
  /// Why nothing can be called any more; empty while all is well. Never waits.
  virtual std::string failure() const = 0;
  CommStats stats() const;
  void reset_stats();

 protected:
  enum class Operation {
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    all_to_all,
    exchange,
    barrier,
    split
  };
  static const char* name_of(Operation operation);
  /// A checked call, as implementations get it.
  struct Request {
    Operation operation = Operation::barrier;
    std::uint64_t sequence = 0;  ///< of this operation in the group; the same on every rank for collectives
    Tensor in, out;              ///< all_reduce and broadcast: both the tensor itself; barrier: undefined
    ReduceOp op = ReduceOp::sum;
    int root = 0;
    /// Elements per rank, always filled for all_to_all; for reduce_scatter and all_gather both are `counts`.
    std::vector<std::int64_t> send_counts, recv_counts;
    std::vector<Transfer> transfers;
    Where where;
    /// If set, called once when the operation has finished (not when it failed) and before its wait returns.
    /// The time is std::chrono::steady_clock's, seconds since its epoch. Outlives the communicator.
    std::function<void(double end_s)> finished;
    /// Whether `finished` reads the time, which costs something to know; 0 will do otherwise.
    bool timed = false;
    /// If set, called once when the operation leaves the queue and begins, where there is a queue.
    std::function<void()> started;
    /// Adds to CommStats::wait_s what a wait held up a stream. Outlives the communicator.
    std::function<void(double seconds)> held_up;
    /// If set, the operation is being recorded: to be called for each further launch of the graph, which is
    /// another operation with a number and an end of its own. Outlives the communicator.
    std::function<RepeatedCall()> again;
  };
  /// What other ranks' calls are compared with.
  static CallSignature signature_of(const Request& request);

  /// Errors: InvalidArgument unless 0 <= rank < size.
  Communicator(int rank, int size, std::string name, CommOptions options);
  /// Starts the operation. The base class has checked arguments, counted bytes, and handled size() 1. The
  /// base class also measures how long the wait of what this returns blocks.
  virtual Pending start(const ExecCtx& ctx, Request request) = 0;
  /// Never called for size() 1. `sequence`: its place among the collectives of this group.
  virtual std::shared_ptr<Communicator> do_split(int color, int key, const std::string& name,
                                                 std::uint64_t sequence, const Where& where) = 0;
  /// For kinds that stand on another one, whose calls they number.
  static Pending start_on(Communicator& other, const ExecCtx& ctx, Request request);
  static std::shared_ptr<Communicator> split_on(Communicator& other, int color, int key,
                                                const std::string& name, std::uint64_t sequence,
                                                const Where& where);
  /// The deadline of what is called from now on; set before the first call.
  virtual void set_timeout(double seconds) { options_.timeout_s = seconds; }
  /// `other` serves this kind alone: it reports no events and has a deadline of its own.
  static void make_helper(Communicator& other, double timeout_s);

 private:
  struct Counters;
  struct Recorded;
  class Waiting;
  Request prepare(Operation operation, const Tensor& in, const Tensor& out, const Where& where) const;
  FlightOperation flight_of(const Request& request, std::uint64_t bytes);
  int flight_group();
  Pending begin(const ExecCtx& ctx, Request request, std::uint64_t bytes);
  std::string call_text(const Request& request) const;
  void check_tensor(const Request& request, const Tensor& tensor, const char* what) const;
  void check_blocks(const Request& request, const Tensor& tensor, const char* what,
                    const std::vector<std::int64_t>& counts) const;
  int rank_, size_;
  std::string name_;
  CommOptions options_;
  std::shared_ptr<Counters> counters_;
};

/// The group of one.
std::shared_ptr<Communicator> make_self_communicator(const std::string& name = "self",
                                                     const CommOptions& options = {});

/// Rank `rank` of `size` where the others are not there: every operation is over at once and what they would
/// have sent stays as it is in memory. Only to a sum of float64, as counts are, each of them gives 1. For
/// shapes, sizes and bytes sent, never for values. Cannot be split.
std::shared_ptr<Communicator> make_absent_communicator(int rank, int size, const std::string& name);

/// `size` ranks for threads of this process: element r is for thread r.
std::vector<std::shared_ptr<Communicator>> make_local_communicators(int size,
                                                                    const std::string& name = "world",
                                                                    const CommOptions& options = {});

}  // namespace tessera
