#include "tessera/comm/communicator.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <numeric>

#include "comm/check.hpp"
#include "comm/reduce.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/comm/placement.hpp"
#include "tessera/device/flight.hpp"
#include "tessera/device/trace.hpp"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

std::uint64_t bytes_of(const Tensor& tensor, std::int64_t elements) {
  return static_cast<std::uint64_t>(elements) * size_of(tensor.dtype());
}

/// Whether two tensors share bytes.
bool overlap(const Tensor& a, const Tensor& b) {
  if (a.nbytes() == 0 || b.nbytes() == 0) return false;
  const auto* begin_a = static_cast<const std::byte*>(a.raw());
  const auto* begin_b = static_cast<const std::byte*>(b.raw());
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

/// Whether `part` lies exactly on block `rank` of `whole`.
bool is_own_block(const Tensor& part, const Tensor& whole, const std::vector<std::int64_t>& counts,
                  int rank) {
  const std::int64_t before = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  return part.raw() == static_cast<const std::byte*>(whole.raw()) + bytes_of(whole, before);
}

/// The caller's counts, or equal blocks; empty if the elements do not divide.
std::vector<std::int64_t> block_counts(std::span<const std::int64_t> counts, std::int64_t elements,
                                       int size) {
  if (!counts.empty()) return {counts.begin(), counts.end()};
  if (elements % size != 0) return {};
  return std::vector<std::int64_t>(static_cast<std::size_t>(size), elements / size);
}

/// A copy on a stream that may run later. On CUDA its memory is used again in the stream's order, so nothing
/// needs to be kept alive.
class Copied : public Pending::State {
 public:
  Copied(const ExecCtx& ctx, const Tensor& in, const Tensor& out) {
    if (!ctx.device().is_cuda()) {
      ctx.stream->launch([in, out] { std::memcpy(out.raw(), in.raw(), in.nbytes()); });
    } else {
      ctx.stream->copy(out.raw(), in.raw(), in.nbytes());
    }
    ctx.stream->record(event_);
  }
  void wait(const ExecCtx& ctx) override {
    if (!ctx.device().is_cuda()) return event_.synchronize();
    ctx.stream->wait(event_);
  }
  bool done() const override { return event_.done(); }

 private:
  Event event_;
};

}  // namespace

struct Communicator::Counters {
  /// Counts an operation, which sends so much. Its number.
  std::uint64_t add(Operation operation, std::uint64_t bytes) {
    const std::lock_guard lock(mutex);
    ++stats.operations;
    stats.bytes_sent += bytes;
    return operation == Operation::exchange ? exchanges++ : collectives++;
  }

  mutable std::mutex mutex;
  CommStats stats;
  std::uint64_t collectives = 0, exchanges = 0;
  int flight_group = -1;  ///< of the recorder below
  std::weak_ptr<FlightRecorder> flight_group_of;
};

/// An operation of the rank's flight recorder; null: it has none.
struct Communicator::Recorded {
  Recorded(std::shared_ptr<FlightRecorder> of, const FlightOperation& what)
      : recorder(std::move(of)), number(recorder ? recorder->add(what, FlightRecord::State::queued) : 0) {}
  void begin() const { recorder->begin(number, FlightOperation::Kind::communication); }
  void end() const { recorder->end(number, FlightOperation::Kind::communication); }

  std::shared_ptr<FlightRecorder> recorder;
  std::uint64_t number;
};

/// Measures how long a wait blocks. `call`: what a trace is told that is waited for; empty if it began before
/// the trace.
class Communicator::Waiting : public Pending::State {
 public:
  Waiting(Pending inner, std::shared_ptr<Counters> counters, std::string call, Recorded recorded)
      : inner_(std::move(inner)),
        counters_(std::move(counters)),
        call_(std::move(call)),
        recorded_(std::move(recorded)) {}
  bool done() const override { return inner_.done(); }
  void wait(const ExecCtx& ctx) override {
    const TraceSpan span(*ctx.stream, [&] {
      return Work{WorkKind::communication, "wait " + (call_.empty() ? "for what began before" : call_)};
    });
    if (inner_.done()) return inner_.wait(ctx);
    const FlightWait waits(recorded_.recorder.get(), recorded_.number);
    const Stopwatch stopwatch{*counters_};
    inner_.wait(ctx);
  }

 private:
  struct Stopwatch {
    Counters& counters;
    Clock::time_point begin = Clock::now();
    ~Stopwatch() {
      const std::lock_guard lock(counters.mutex);
      counters.stats.wait_s += seconds(Clock::now() - begin);
    }
  };
  Pending inner_;
  std::shared_ptr<Counters> counters_;
  std::string call_;
  Recorded recorded_;
};

void Pending::wait(const ExecCtx& ctx) const {
  if (state_) state_->wait(ctx);
}

Communicator::Communicator(int rank, int size, std::string name, CommOptions options)
    : rank_(rank),
      size_(size),
      name_(std::move(name)),
      options_(std::move(options)),
      counters_(std::make_shared<Counters>()) {
  TESSERA_CHECK(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of group ", name_, " of ", size);
}

const char* Communicator::name_of(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::reduce_scatter:
      return "reduce_scatter";
    case Operation::all_gather:
      return "all_gather";
    case Operation::broadcast:
      return "broadcast";
    case Operation::all_to_all:
      return "all_to_all";
    case Operation::exchange:
      return "exchange";
    case Operation::barrier:
      return "barrier";
    case Operation::split:
      return "split";
  }
  return "?";
}

CallSignature Communicator::signature_of(const Request& request) {
  CallSignature call;
  call.operation = name_of(request.operation);
  call.where = place_of(request.where);
  if (request.in) call.dtype = std::string(tessera::name_of(request.in.dtype()));
  call.send_counts = request.send_counts;
  call.recv_counts = request.recv_counts;
  if (request.operation == Operation::all_reduce || request.operation == Operation::broadcast)
    call.count = request.in.numel();
  if (request.operation == Operation::all_reduce || request.operation == Operation::reduce_scatter)
    call.reduction = request.op == ReduceOp::sum ? "sum" : "max";
  if (request.operation == Operation::broadcast) call.root = request.root;
  return call;
}

std::string Communicator::call_text(const Request& request) const {
  return detail::concat(name_of(request.operation), " on group ", name_, " of ", size_, " at ",
                        place_of(request.where));
}

void Communicator::check_tensor(const Request& request, const Tensor& tensor, const char* what) const {
  TESSERA_CHECK(tensor, call_text(request), ": ", what, " is an undefined tensor");
  TESSERA_CHECK(tensor.is_contiguous(), call_text(request), ": ", what, " of shape ", tensor.shape(),
                " is not contiguous (strides ", tensor.strides(), ")");
}

void Communicator::check_blocks(const Request& request, const Tensor& tensor, const char* what,
                                const std::vector<std::int64_t>& counts) const {
  TESSERA_CHECK(static_cast<int>(counts.size()) == size_, call_text(request), ": ", counts.size(),
                " counts for ", size_, " ranks");
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    TESSERA_CHECK(count >= 0, call_text(request), ": a block of ", count, " elements");
    sum += count;
  }
  TESSERA_CHECK(sum == tensor.numel(), call_text(request), ": ", what, " has ", tensor.numel(),
                " elements, its blocks ", sum);
}

Communicator::Request Communicator::prepare(Operation operation, const Tensor& in, const Tensor& out,
                                            const Where& where) const {
  Request request;
  request.operation = operation;
  request.in = in;
  request.out = out;
  request.where = where;
  check_tensor(request, in, "the input");
  check_tensor(request, out, "the output");
  TESSERA_CHECK(in.dtype() == out.dtype(), call_text(request), ": input is ", in.dtype(), ", output ",
                out.dtype());
  if (operation == Operation::all_reduce || operation == Operation::reduce_scatter) {
    TESSERA_CHECK(is_reducible(in.dtype()), call_text(request), ": ", in.dtype(), " cannot be reduced");
  }
  return request;
}

FlightOperation Communicator::flight_of(const Request& request, std::uint64_t bytes) {
  if (!options_.flight) return {};
  const bool exchanges = request.operation == Operation::exchange;
  const Transfer* const first = request.transfers.empty() ? nullptr : &request.transfers.front();
  const auto alike = [&](const Transfer& t) { return t.kind == first->kind && t.peer == first->peer; };
  const bool one_way = exchanges && first != nullptr && std::ranges::all_of(request.transfers, alike);
  const Tensor& tensor = first != nullptr ? first->tensor : request.in;
  FlightOperation what{
      .kind = FlightOperation::Kind::communication,
      .name = one_way ? (first->kind == Transfer::Kind::send ? "send" : "recv") : name_of(request.operation),
      .peer = first != nullptr ? first->peer : -1,
      .sequence = request.sequence,
      .bytes = bytes};
  if (tensor) {
    what.dtype = tessera::name_of(tensor.dtype()).data();
    for (const std::int64_t n : tensor.shape().dims()) {
      if (what.dims < static_cast<int>(what.shape.size()))
        what.shape[static_cast<std::size_t>(what.dims++)] = n;
    }
  }
  what.group = flight_group();
  return what;
}

int Communicator::flight_group() {
  const std::lock_guard lock(counters_->mutex);
  if (counters_->flight_group_of.lock() != options_.flight) {
    counters_->flight_group = options_.flight->add_group(name_, members());
    counters_->flight_group_of = options_.flight;
  }
  return counters_->flight_group;
}

Pending Communicator::begin(const ExecCtx& ctx, Request request, std::uint64_t bytes) {
  const Operation operation = request.operation;
  if (size_ == 1) {
    counters_->add(operation, 0);
    if (ctx.stream->is_recorded())
      ctx.stream->when_relaunched(
          [counters = counters_, operation](const Event&) { counters->add(operation, 0); });
    if (request.in.raw() == request.out.raw() || request.in.nbytes() == 0) return {};
    return Pending(std::make_shared<Copied>(ctx, request.in, request.out));
  }
  const std::shared_ptr<Trace>& trace = ctx.stream->trace();
  const Work work{.kind = WorkKind::communication,
                  .name = trace ? detail::concat(name_of(request.operation), " ", name_) : "",
                  .bytes = static_cast<double>(bytes)};
  request.sequence = counters_->add(operation, bytes);
  const FlightOperation flown = flight_of(request, bytes);
  const Recorded recorded(options_.flight, flown);
  if (recorded.recorder) {
    request.started = [recorded] { recorded.begin(); };
    request.finished = [recorded](double) { recorded.end(); };
  }
  if (ctx.stream->is_recorded()) {
    request.again = [counters = counters_, recorder = options_.flight, operation, bytes, flown] {
      RepeatedCall again{.sequence = counters->add(operation, bytes)};
      FlightOperation what = flown;
      what.sequence = again.sequence;
      if (recorder) again.finished = [next = Recorded(recorder, what)](double) { next.end(); };
      return again;
    };
  }
  if (trace) {
    // Called before a wait returns on the CPU; on CUDA a little later, before the communicator is gone.
    request.timed = true;
    request.finished = [lane = "communication " + name_, begin_s = now_s(), work, trace,
                        noted = std::move(request.finished)](double end_s) {
      if (noted) noted(end_s);
      trace->add(lane, {work, begin_s, end_s});
    };
  }
  request.held_up = [counters = counters_](double held_up_s) {
    const std::lock_guard lock(counters->mutex);
    counters->stats.wait_s += held_up_s;
  };
  const TraceSpan span(*ctx.stream, [&] { return Work{WorkKind::communication, "start " + work.name}; });
  Pending pending = start(ctx, std::move(request));
  return Pending(std::make_shared<Waiting>(std::move(pending), counters_, work.name, recorded));
}

Pending Communicator::all_reduce(const ExecCtx& ctx, const Tensor& x, ReduceOp op, const Where& where) {
  Request request = prepare(Operation::all_reduce, x, x, where);
  request.op = op;
  const std::int64_t own = part_of(x.numel(), rank_, size_).count;
  return begin(ctx, std::move(request), bytes_of(x, x.numel() - own + (size_ - 1) * own));
}

Pending Communicator::reduce_scatter(const ExecCtx& ctx, const Tensor& in, const Tensor& out,
                                     std::span<const std::int64_t> counts, ReduceOp op, const Where& where) {
  Request request = prepare(Operation::reduce_scatter, in, out, where);
  request.op = op;
  request.send_counts = request.recv_counts = block_counts(counts, in.numel(), size_);
  TESSERA_CHECK(!request.send_counts.empty(), call_text(request), ": ", in.numel(),
                " elements do not divide into ", size_, " equal blocks; give counts");
  check_blocks(request, in, "the input", request.send_counts);
  const std::int64_t own = request.send_counts[static_cast<std::size_t>(rank_)];
  TESSERA_CHECK(out.numel() == own, call_text(request), ": the output has ", out.numel(), " elements, block ",
                rank_, " has ", own);
  TESSERA_CHECK(!overlap(in, out) || is_own_block(out, in, request.send_counts, rank_), call_text(request),
                ": the output overlaps the input, but is not its block ", rank_);
  return begin(ctx, std::move(request), bytes_of(in, in.numel() - own));
}

Pending Communicator::all_gather(const ExecCtx& ctx, const Tensor& in, const Tensor& out,
                                 std::span<const std::int64_t> counts, const Where& where) {
  Request request = prepare(Operation::all_gather, in, out, where);
  request.send_counts = request.recv_counts = block_counts(counts, out.numel(), size_);
  TESSERA_CHECK(!request.recv_counts.empty(), call_text(request), ": ", out.numel(),
                " elements do not divide into ", size_, " equal blocks; give counts");
  check_blocks(request, out, "the output", request.recv_counts);
  const std::int64_t own = request.recv_counts[static_cast<std::size_t>(rank_)];
  TESSERA_CHECK(in.numel() == own, call_text(request), ": the input has ", in.numel(), " elements, block ",
                rank_, " has ", own);
  TESSERA_CHECK(!overlap(in, out) || is_own_block(in, out, request.recv_counts, rank_), call_text(request),
                ": the input overlaps the output, but is not its block ", rank_);
  return begin(ctx, std::move(request), bytes_of(in, (size_ - 1) * own));
}

Pending Communicator::broadcast(const ExecCtx& ctx, const Tensor& x, int root, const Where& where) {
  Request request = prepare(Operation::broadcast, x, x, where);
  TESSERA_CHECK(root >= 0 && root < size_, call_text(request), ": there is no root ", root);
  request.root = root;
  return begin(ctx, std::move(request), rank_ == root ? bytes_of(x, (size_ - 1) * x.numel()) : 0);
}

Pending Communicator::all_to_all(const ExecCtx& ctx, const Tensor& in, const Tensor& out,
                                 std::span<const std::int64_t> send_counts,
                                 std::span<const std::int64_t> recv_counts, const Where& where) {
  Request request = prepare(Operation::all_to_all, in, out, where);
  request.send_counts.assign(send_counts.begin(), send_counts.end());
  request.recv_counts.assign(recv_counts.begin(), recv_counts.end());
  check_blocks(request, in, "the input", request.send_counts);
  check_blocks(request, out, "the output", request.recv_counts);
  const auto own = static_cast<std::size_t>(rank_);
  TESSERA_CHECK(send_counts[own] == recv_counts[own], call_text(request), ": rank ", rank_, " sends itself ",
                send_counts[own], " elements and receives ", recv_counts[own]);
  TESSERA_CHECK(!overlap(in, out), call_text(request), ": the output overlaps the input");
  return begin(ctx, std::move(request), bytes_of(in, in.numel() - send_counts[own]));
}

Pending Communicator::exchange(const ExecCtx& ctx, std::vector<Transfer> transfers, const Where& where) {
  Request request;
  request.operation = Operation::exchange;
  request.where = where;
  std::uint64_t bytes = 0;
  for (const Transfer& transfer : transfers) {
    const bool sends = transfer.kind == Transfer::Kind::send;
    check_tensor(request, transfer.tensor, sends ? "a tensor to send" : "a tensor to receive");
    TESSERA_CHECK(transfer.peer >= 0 && transfer.peer < size_ && transfer.peer != rank_, call_text(request),
                  ": rank ", rank_, " cannot exchange messages with rank ", transfer.peer);
    if (sends) bytes += transfer.tensor.nbytes();
  }
  request.transfers = std::move(transfers);
  return begin(ctx, std::move(request), bytes);
}

Pending Communicator::send(const ExecCtx& ctx, const Tensor& x, int peer, std::uint32_t tag,
                           const Where& where) {
  return exchange(ctx, {{Transfer::Kind::send, x, peer, tag}}, where);
}

Pending Communicator::recv(const ExecCtx& ctx, const Tensor& x, int peer, std::uint32_t tag,
                           const Where& where) {
  return exchange(ctx, {{Transfer::Kind::recv, x, peer, tag}}, where);
}

void Communicator::barrier(const ExecCtx& ctx, const Where& where) {
  Request request;
  request.operation = Operation::barrier;
  request.where = where;
  begin(ctx, std::move(request), 0).wait(ctx);
}

std::shared_ptr<Communicator> Communicator::split(int color, int key, const std::string& name,
                                                  const Where& where) {
  const std::uint64_t sequence = counters_->add(Operation::split, 0);
  if (size_ > 1) {
    Request request;
    request.operation = Operation::split;
    request.sequence = sequence;
    const Recorded recorded(options_.flight, flight_of(request, 0));
    const FlightWait waits(recorded.recorder.get(), recorded.number);
    auto group = do_split(color, key, name, sequence, where);
    if (recorded.recorder) recorded.end();
    return group;
  }
  return color < 0 ? nullptr : make_self_communicator(name, options_);
}

Pending Communicator::start_on(Communicator& other, const ExecCtx& ctx, Request request) {
  return other.start(ctx, std::move(request));
}

std::shared_ptr<Communicator> Communicator::split_on(Communicator& other, int color, int key,
                                                     const std::string& name, std::uint64_t sequence,
                                                     const Where& where) {
  return other.do_split(color, key, name, sequence, where);
}

void Communicator::make_helper(Communicator& other, double timeout_s) {
  other.options_.flight = nullptr;
  other.set_timeout(timeout_s);
}

CommStats Communicator::stats() const {
  const std::lock_guard lock(counters_->mutex);
  return counters_->stats;
}

void Communicator::reset_stats() {
  const std::lock_guard lock(counters_->mutex);
  counters_->stats = {};
}

}  // namespace tessera
