#include <algorithm>
#include <map>

#include "comm/check.hpp"
#include "comm/heartbeats.hpp"
#include "comm/nccl/ask.hpp"
#include "comm/nccl/collectives.hpp"
#include "comm/nccl/link.hpp"
#include "comm/nccl/pending.hpp"
#include "tessera/base/clock.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/nccl.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera {
namespace {

/// Messages of one call, which has ended when the last of them has.
class NcclBatch {
 public:
  NcclBatch(std::int64_t messages, RepeatedCall call, std::function<RepeatedCall()> again)
      : messages_(messages), call_(std::move(call)), again_(std::move(again)) {}

  /// What the next message belongs to: after the last one of the call, the first of another launch's.
  RepeatedCall next() {
    if (given_++ % messages_ == 0) {
      if (given_ > 1) call_ = again_();
      left_ = std::make_shared<std::int64_t>(messages_);
    }
    if (!call_.finished) return {call_.sequence};
    // One thread, the watchdog's, calls all of them.
    return {call_.sequence, [left = left_, finished = call_.finished](double end_s) {
              if (--*left == 0) finished(end_s);
            }};
  }

 private:
  std::int64_t messages_, given_ = 0;
  RepeatedCall call_;
  std::function<RepeatedCall()> again_;
  std::shared_ptr<std::int64_t> left_;
};

class NcclCommunicator : public Communicator, public Heartbeats {
 public:
  /// `base`: a group over the host that nobody else calls. With `parent`, the group's lane is split off that
  /// one, under `color`; else it gets an id of its own.
  NcclCommunicator(std::shared_ptr<NcclJob> job, const std::shared_ptr<Communicator>& base,
                   NcclLane* parent = nullptr, int color = 0);
  ~NcclCommunicator() override;

  void connect_to(std::span<const int> peers) override;
  void abort(const std::string& reason) override { job_->fail(reason); }
  void heartbeat() override { job_->heartbeat(); }
  std::chrono::steady_clock::time_point last_heartbeat() const override { return job_->last_heartbeat(); }
  std::string failure() const override { return job_->failure(); }
  std::vector<int> members() const override { return names_; }

 protected:
  Pending start(const ExecCtx& ctx, Request request) override;
  std::shared_ptr<Communicator> do_split(int color, int key, const std::string& name, std::uint64_t sequence,
                                         const Where& where) override;

 private:
  void connect(NcclLane* parent, int color);
  std::string text_of(const Request& request) const;
  std::string place_text(const Request& request) const;
  std::shared_ptr<const NcclTask::What> what_of(const Request& request, int peer = -1) const;
  CallSignature signed_call(const Request& request) const;
  bool on_gpu(const ExecCtx& ctx, const Request& request) const;
  void compare(const Request& request);
  Pending start_on_host(const ExecCtx& ctx, Request request);
  Pending start_collective(const ExecCtx& ctx, Request request);
  Pending start_exchange(const ExecCtx& ctx, Request request);
  NcclLane::Work work_of(const Request& request) const;
  void announce(NcclPending& pending, const Transfer& transfer, std::uint32_t number, const Where& where);
  NcclLink& link_to(int peer);

  std::shared_ptr<NcclJob> job_;
  std::shared_ptr<Communicator>
      host_;  ///< for operations on CPU tensors and splits, under their numbers here
  std::shared_ptr<Communicator> control_;  ///< for set-up and the checking mode
  std::shared_ptr<Communicator> probe_;    ///< for the watchdog
  std::vector<int> names_;                 ///< of the group's ranks in messages
  std::string members_;
  std::shared_ptr<NcclLane> lane_;  ///< collectives; null in a group of one
  std::map<int, std::unique_ptr<NcclLink>> links_;
  ExecCtx host_ctx_ = ExecCtx::cpu(1);
};

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclJob> job, const std::shared_ptr<Communicator>& base,
                                   NcclLane* parent, int color)
    : Communicator(base->rank(), base->size(), base->name(), base->options()), job_(std::move(job)) {
  if (size() == 1) {
    if (parent != nullptr) NcclLane::stay_out(*parent);
    return;
  }
  host_ = base->split(0, rank(), name());
  control_ = base->split(0, rank(), name());
  probe_ = base->split(0, rank(), name());
  make_helper(*control_, options().timeout_s);
  make_helper(*probe_, nccl_ask_timeout_s(options().timeout_s));
  try {
    connect(parent, color);
  } catch (const CommunicationError& error) {
    job_->fail(error.what());
    throw;
  }
}

void NcclCommunicator::connect(NcclLane* parent, int color) {
  struct Introduction {
    ncclUniqueId id{};
    int name = 0;
  };
  std::vector<Introduction> all(static_cast<std::size_t>(size()));
  Introduction& own = all[static_cast<std::size_t>(rank())];
  own.name = job_->rank();
  if (rank() == 0 && parent == nullptr) own.id = NcclLane::make_id();
  const auto bytes = static_cast<std::int64_t>(sizeof(Introduction));
  const Tensor whole = Tensor::wrap(all.data(), {size() * bytes}, DType::u8);
  control_->all_gather(host_ctx_, whole.narrow(0, rank() * bytes, bytes), whole).wait(host_ctx_);
  for (const Introduction& each : all) {
    names_.push_back(each.name);
    members_ += detail::concat(members_.empty() ? "" : ", ", each.name);
  }
  lane_ = std::make_shared<NcclLane>(
      *job_,
      NcclLane::Options{
          .name = "group " + name() + " (ranks " + members_ + ")",
          .rank = rank(),
          .size = size(),
          .timeout_s = options().timeout_s,
          .host_failure =
              [host = host_, control = control_] {
                const std::string failure = host->failure();
                return failure.empty() ? control->failure() : failure;
              },
          .explain = [probe = probe_, names = names_, timeout_s = options().timeout_s](
                         const NcclTask& task) { return nccl_explain(*probe, names, task, timeout_s); }});
  job_->watch(lane_);
  const auto warm_up = [](NcclCalls& calls, void* memory) {
    calls.add(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclMax, calls.comm, calls.native()),
              "ncclAllReduce");
  };
  if (parent == nullptr) return lane_->connect(all.front().id, warm_up);
  lane_->connect(*parent, color, warm_up);
}

NcclCommunicator::~NcclCommunicator() {
  try {
    for (const auto& [peer, link] : links_) link->close();
    if (lane_) lane_->close();
  } catch (const std::exception& error) {
    job_->fail_here(detail::concat("group ", name(), " could not be closed: ", error.what()));
  }
}

std::string NcclCommunicator::text_of(const Request& request) const {
  return detail::concat(name_of(request.operation), " ", request.sequence, " on ", place_text(request));
}

std::string NcclCommunicator::place_text(const Request& request) const {
  return detail::concat("group ", name(), " (ranks ", members_, ") at ", place_of(request.where));
}

/// `peer`: of a message.
std::shared_ptr<const NcclTask::What> NcclCommunicator::what_of(const Request& request, int peer) const {
  NcclTask::What what{.operation = name_of(request.operation),
                      .place = place_text(request),
                      .call = peer < 0 ? signed_call(request) : CallSignature(),
                      .peer = peer};
  return std::make_shared<const NcclTask::What>(std::move(what));
}

/// Tensors on the host and on a GPU do not belong together.
CallSignature NcclCommunicator::signed_call(const Request& request) const {
  CallSignature call = signature_of(request);
  if (request.in && !request.in.device().is_cpu()) call.dtype += "[cuda]";
  return call;
}

bool NcclCommunicator::on_gpu(const ExecCtx& ctx, const Request& request) const {
  std::vector<Device> devices;
  if (request.in) devices = {request.in.device(), request.out.device()};
  for (const Transfer& transfer : request.transfers) devices.push_back(transfer.tensor.device());
  const auto is_cpu = [](const Device& device) { return device.is_cpu(); };
  if (std::all_of(devices.begin(), devices.end(), is_cpu)) return false;
  for (const Device& device : devices) {
    TESSERA_CHECK(device == job_->device(), text_of(request), ": a tensor is on ", device, ", the group on ",
                  job_->device());
  }
  TESSERA_CHECK(ctx.device() == job_->device(), text_of(request), ": tensors are on ", job_->device(),
                ", the stream on ", ctx.device());
  return true;
}

/// Every rank finds the same mismatch by itself.
void NcclCommunicator::compare(const Request& request) {
  std::vector<CallSignature> calls;
  for (const std::string& text : nccl_gather_texts(*control_, signed_call(request).encode()))
    calls.push_back(CallSignature::decode(text));
  const std::string mismatch = find_mismatch(calls, names_, name(), request.sequence);
  if (mismatch.empty()) return;
  job_->fail(mismatch);
  throw CommunicationError(mismatch);
}

Pending NcclCommunicator::start(const ExecCtx& ctx, Request request) {
  if (job_->failed()) job_->check(text_of(request) + " was called");
  const bool gpu = on_gpu(ctx, request);
  try {
    const bool exchanges = request.operation == Operation::exchange;
    if (options().check && !exchanges) compare(request);
    if (!gpu) return start_on_host(ctx, std::move(request));
    return exchanges ? start_exchange(ctx, std::move(request)) : start_collective(ctx, std::move(request));
  } catch (const CommunicationError& error) {
    job_->fail(error.what());
    throw;
  }
}

/// The host's kinds know CPU streams only.
Pending NcclCommunicator::start_on_host(const ExecCtx& ctx, Request request) {
  if (ctx.device().is_cpu()) return start_on(*host_, ctx, std::move(request));
  Event ready;
  ctx.stream->record(ready);
  ready.synchronize();
  return start_on(*host_, host_ctx_, std::move(request));
}

NcclLane::Work NcclCommunicator::work_of(const Request& request) const {
  switch (request.operation) {
    case Operation::all_reduce:
      return nccl_calls::all_reduce(request.in, request.op);
    case Operation::reduce_scatter:
      return nccl_calls::reduce_scatter(request.in, request.out, request.send_counts, request.op, rank());
    case Operation::all_gather:
      return nccl_calls::all_gather(request.in, request.out, request.recv_counts, rank());
    case Operation::broadcast:
      return nccl_calls::broadcast(request.in, request.root);
    case Operation::all_to_all:
      return nccl_calls::all_to_all(request.in, request.out, request.send_counts, request.recv_counts,
                                    rank());
    default:
      throw InternalError(detail::concat(text_of(request), " is no operation on CUDA tensors"));
  }
}

Pending NcclCommunicator::start_collective(const ExecCtx& ctx, Request request) {
  auto pending = std::make_shared<NcclPending>(job_, control_, text_of(request));
  auto task = std::make_shared<NcclTask>(std::vector<Tensor>{request.in, request.out});
  task->what = what_of(request);
  task->sequence = request.sequence;
  task->finished = std::move(request.finished);
  task->timed = request.timed;
  task->again = std::move(request.again);
  task->held_up = std::move(request.held_up);
  ctx.stream->record(task->ready);
  pending->add(lane_, task);
  NcclLane::post({{lane_.get(), task, work_of(request)}});
  return Pending(std::move(pending));
}

NcclLink& NcclCommunicator::link_to(int peer) {
  auto& link = links_[peer];
  if (!link) {
    link = std::make_unique<NcclLink>(
        job_, NcclLink::Options{.group = name(),
                                .rank = rank(),
                                .peer = peer,
                                .rank_name = names_[static_cast<std::size_t>(rank())],
                                .peer_name = names_[static_cast<std::size_t>(peer)],
                                .timeout_s = options().timeout_s,
                                .control = control_,
                                .explain = [timeout_s = options().timeout_s](const NcclTask& task) {
                                  return detail::concat(task.text(), ": rank ", task.what->peer,
                                                        " did not come within ", timeout_s, " s");
                                }});
  }
  return *link;
}

void NcclCommunicator::connect_to(std::span<const int> peers) {
  for (const int peer : peers) link_to(peer);
  for (const int peer : peers) link_to(peer).await_connection();
}

void NcclCommunicator::announce(NcclPending& pending, const Transfer& transfer, std::uint32_t number,
                                const Where& where) {
  NcclAnnouncement own{.tag = transfer.tag,
                       .dtype = static_cast<std::uint32_t>(transfer.tensor.dtype()),
                       .bytes = transfer.tensor.nbytes(),
                       .where = {}};
  place_of(where).copy(own.where.data(), own.where.size() - 1);
  if (transfer.kind == Transfer::Kind::recv) {
    const int peer_name = names_[static_cast<std::size_t>(transfer.peer)];
    return pending.add_expected({transfer.peer, peer_name, number, own});
  }
  const Tensor text = Tensor::empty(host_ctx_, {static_cast<std::int64_t>(sizeof own)}, DType::u8);
  text.copy_from_host(&own);
  pending.add_announced(control_->send(host_ctx_, text, transfer.peer, nccl_announcement_tag(number), where));
}

Pending NcclCommunicator::start_exchange(const ExecCtx& ctx, Request request) {
  auto& transfers = request.transfers;
  std::stable_sort(transfers.begin(), transfers.end(),
                   [](const Transfer& a, const Transfer& b) { return a.tag < b.tag; });
  auto pending = std::make_shared<NcclPending>(job_, control_, text_of(request));
  Event ready;
  ctx.stream->record(ready);
  // Empty messages have nothing to carry, on either side.
  const auto carries = [](const Transfer& transfer) { return transfer.tensor.nbytes() > 0; };
  const auto messages = std::count_if(transfers.begin(), transfers.end(), carries);
  const auto end_at_once = [](const RepeatedCall& call) {
    if (call.finished) call.finished(now_s());
  };
  if (messages == 0) {
    end_at_once({request.sequence, request.finished});
    if (request.again)
      ctx.stream->when_relaunched([=, again = request.again](const Event&) { end_at_once(again()); });
  }
  const auto batch =
      std::make_shared<NcclBatch>(messages, RepeatedCall{request.sequence, request.finished}, request.again);
  std::vector<NcclLane::Posted> posted;
  for (const Transfer& transfer : transfers) {
    NcclLink& link = link_to(transfer.peer);
    const std::uint32_t number = link.count(transfer.kind);
    if (options().check) announce(*pending, transfer, number, request.where);
    if (!carries(transfer)) continue;
    auto task = std::make_shared<NcclTask>(std::vector<Tensor>{transfer.tensor});
    task->what = what_of(request, names_[static_cast<std::size_t>(transfer.peer)]);
    task->ready = ready;
    RepeatedCall call = batch->next();
    task->sequence = call.sequence;
    task->finished = std::move(call.finished);
    task->timed = request.timed;
    if (request.again) task->again = [batch] { return batch->next(); };
    task->held_up = request.held_up;
    const auto& lane = link.lane(transfer.kind);
    pending->add(lane, task);
    posted.push_back({lane.get(), std::move(task), nccl_calls::message(transfer)});
  }
  NcclLane::post(std::move(posted));
  return Pending(std::move(pending));
}

std::shared_ptr<Communicator> NcclCommunicator::do_split(int color, int key, const std::string& name,
                                                         std::uint64_t sequence, const Where& where) {
  Request request;
  request.operation = Operation::split;
  request.sequence = sequence;
  request.where = where;
  if (job_->failed()) job_->check(text_of(request) + " was called");
  try {
    if (options().check) compare(request);
    const auto base = split_on(*host_, color, key, name, sequence, where);
    if (!base) {
      NcclLane::stay_out(*lane_);
      return nullptr;
    }
    return std::make_shared<NcclCommunicator>(job_, base, lane_.get(), color);
  } catch (const CommunicationError& error) {
    job_->fail(error.what());
    throw;
  }
}

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Communicator> host, Device device) {
  TESSERA_CHECK(host != nullptr, "a communicator over NCCL needs one over the host");
  TESSERA_CHECK(!device.is_cpu(), "a communicator over NCCL needs a CUDA device, not ", device);
  const CudaDevices devices = cuda_devices();
  TESSERA_ENSURE(ConfigError,
                 device.index<devices.count, "a communicator over NCCL on ", device, ": ", devices.count> 0
                     ? detail::concat("there are ", devices.count, " devices")
                     : devices.why_none);
  auto job = std::make_shared<NcclJob>(host, device);
  return std::make_shared<NcclCommunicator>(std::move(job), std::move(host));
}

}  // namespace tessera
