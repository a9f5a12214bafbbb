#include "comm/nccl/link.hpp"

#include "comm/gloo_signals.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

/// A kernel of NCCL that waits for its message keeps its blocks on the multiprocessors. So few of them: a
/// message takes longer than it could, the layers computed meanwhile do not.
constexpr int kMessageCtas = 4;
/// Tag of the ids on the control group; the messages of the checking mode count up from the next.
constexpr std::uint32_t kIdTag = 0;

}  // namespace

NcclLink::NcclLink(std::shared_ptr<NcclJob> job, Options options)
    : job_(std::move(job)), options_(std::move(options)) {
  const auto lane = [&](int from, int to, int rank) {
    auto made = std::make_shared<NcclLane>(
        *job_, NcclLane::Options{.name = detail::concat("messages from rank ", from, " to rank ", to,
                                                        " in group ", options_.group),
                                 .rank = rank,
                                 .size = 2,
                                 .max_ctas = kMessageCtas,
                                 .timeout_s = options_.timeout_s,
                                 .host_failure = [control = options_.control] { return control->failure(); },
                                 .explain = options_.explain});
    job_->watch(made);
    return made;
  };
  out_ = lane(options_.rank_name, options_.peer_name, 0);
  in_ = lane(options_.peer_name, options_.rank_name, 1);
  const SignalsBlocked signals;
  connector_ = std::thread([this] {
    try {
      connect();
    } catch (const std::exception& error) {
      job_->fail(error.what());
    }
  });
}

NcclLink::~NcclLink() {
  if (connector_.joinable()) connector_.join();
}

void NcclLink::await_connection() {
  const auto begin = NcclTask::Clock::now();
  while (!(out_->is_connected() && in_->is_connected())) {
    const std::string doing = detail::concat("connecting rank ", options_.rank_name, " and rank ",
                                             options_.peer_name, " in group ", options_.group);
    job_->check(doing);
    TESSERA_ENSURE(CommunicationError, !job_->is_overdue(begin, options_.timeout_s), doing,
                   " did not end within ", options_.timeout_s, " s");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void NcclLink::close() {
  connector_.join();  // messages may still wait for the connection
  out_->close();
  in_->close();
}

/// Both ends come here when they first want something of each other; then all goes on without further
/// dependence, so neither can be held up. The lower rank makes the ids. The lanes are connected, and warmed
/// up (NCCL sets up the connection itself with the first message, for which it needs both ends), in an order
/// both ends share.
void NcclLink::connect() {
  const ExecCtx ctx = ExecCtx::cpu(1);
  const bool lower = options_.rank < options_.peer;
  std::array<ncclUniqueId, 2> own{}, theirs{};
  if (lower) own = {NcclLane::make_id(), NcclLane::make_id()};
  const Shape shape{static_cast<std::int64_t>(sizeof own)};
  options_.control
      ->exchange(
          ctx, {{Transfer::Kind::send, Tensor::wrap(own.data(), shape, DType::u8), options_.peer, kIdTag},
                {Transfer::Kind::recv, Tensor::wrap(theirs.data(), shape, DType::u8), options_.peer, kIdTag}})
      .wait(ctx);
  const auto& ids = lower ? own : theirs;
  const auto send = [](NcclCalls& calls, void* memory) {
    calls.add(ncclSend(memory, NcclJob::kWarmUpBytes, ncclUint8, 1, calls.comm, calls.native()), "ncclSend");
  };
  const auto receive = [](NcclCalls& calls, void* memory) {
    calls.add(ncclRecv(memory, NcclJob::kWarmUpBytes, ncclUint8, 0, calls.comm, calls.native()), "ncclRecv");
  };
  if (lower) {
    out_->connect(ids[0], send);
    in_->connect(ids[1], receive);
  } else {
    in_->connect(ids[0], receive);
    out_->connect(ids[1], send);
  }
}

}  // namespace tessera
