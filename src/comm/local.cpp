#include "comm/local.hpp"

#include <numeric>

namespace tessera {
namespace {

class LocalPending : public Pending::State {
 public:
  /// `what` has lost its tensors: the work holds them as long as it needs them.
  LocalPending(std::shared_ptr<LocalGroup> group, std::shared_ptr<LocalWork> work,
               LocalCommunicator::Request what)
      : group_(std::move(group)), work_(std::move(work)), what_(std::move(what)) {}
  void wait(const ExecCtx&) override { group_->wait(*work_, what_); }
  bool done() const override { return group_->done(*work_); }

 private:
  std::shared_ptr<LocalGroup> group_;
  std::shared_ptr<LocalWork> work_;
  LocalCommunicator::Request what_;
};

/// What messages need of a request.
LocalCommunicator::Request without_tensors(const LocalCommunicator::Request& request) {
  LocalCommunicator::Request what;
  what.operation = request.operation;
  what.sequence = request.sequence;
  what.where = request.where;
  return what;
}

}  // namespace

LocalCommunicator::LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank, const std::string& name,
                                     const CommOptions& options)
    : Communicator(rank, group->size(), name, options), group_(std::move(group)) {}

void LocalCommunicator::abort(const std::string& reason) { group_->abort(reason); }

void LocalCommunicator::heartbeat() { group_->heartbeat(); }
std::chrono::steady_clock::time_point LocalCommunicator::last_heartbeat() const {
  return group_->last_heartbeat();
}

std::string LocalCommunicator::failure() const { return group_->failure(); }

std::vector<int> LocalCommunicator::members() const { return group_->ranks(); }

void LocalCommunicator::set_timeout(double seconds) {
  Communicator::set_timeout(seconds);
  group_->set_timeout(seconds);
}

Pending LocalCommunicator::start(const ExecCtx& ctx, Request request) {
  const Request what = without_tensors(request);
  if (request.operation == Operation::exchange) {
    auto work = group_->enter_exchange(request);
    ctx.stream->launch([group = group_, work, rank = rank(), request = std::move(request)] {
      group->post_exchange(work, rank, request);
    });
    return Pending(std::make_shared<LocalPending>(group_, std::move(work), what));
  }
  auto work = group_->enter(request.sequence);
  LocalCollective::Call call;
  call.request = std::move(request);
  ctx.stream->launch(
      [group = group_, work, rank = rank(), call = std::move(call)] { group->post(work, rank, call); });
  return Pending(std::make_shared<LocalPending>(group_, std::move(work), what));
}

std::shared_ptr<Communicator> LocalCommunicator::do_split(int color, int key, const std::string& name,
                                                          std::uint64_t sequence, const Where& where) {
  LocalCollective::Call call;
  call.request.operation = Operation::split;
  call.request.sequence = sequence;
  call.request.where = where;
  call.color = color;
  call.key = key;
  call.name = name;
  const Request what = call.request;
  const auto work = group_->enter(sequence);
  group_->post(work, rank(), std::move(call));
  group_->wait(*work, what);
  const LocalCollective::Call& result = work->calls[static_cast<std::size_t>(rank())];
  if (!result.group) return nullptr;
  return std::make_shared<LocalCommunicator>(result.group, result.rank, name, options());
}

std::vector<std::shared_ptr<Communicator>> make_local_communicators(int size, const std::string& name,
                                                                    const CommOptions& options) {
  TESSERA_CHECK(size >= 1, "a group of ", size, " ranks");
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto group = std::make_shared<LocalGroup>(name, ranks, options);
  std::vector<std::shared_ptr<Communicator>> members;
  for (const int rank : ranks)
    members.push_back(std::make_shared<LocalCommunicator>(group, rank, name, options));
  return members;
}

}  // namespace tessera
