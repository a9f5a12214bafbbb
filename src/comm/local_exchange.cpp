#include <algorithm>
#include <cstring>

#include "comm/check.hpp"
#include "comm/local.hpp"

namespace tessera {

std::shared_ptr<LocalExchange> LocalGroup::enter_exchange(const Request& request) {
  auto work = std::make_shared<LocalExchange>();
  work->finished = request.finished;
  for (const Transfer& transfer : request.transfers) {
    if (transfer.kind == Transfer::Kind::recv) work->awaited.push_back(transfer.peer);
  }
  const Lock lock(mutex_);
  check_alive();
  return work;
}

void LocalGroup::post_exchange(const std::shared_ptr<LocalExchange>& work, int rank, const Request& request) {
  const std::string where = place_of(request.where);
  for (const Transfer& transfer : request.transfers) {
    if (transfer.kind == Transfer::Kind::send) {
      send(rank, transfer, where);
    } else {
      receive(work, rank, transfer, where);
    }
  }
  Lock lock(mutex_);
  work->posted = true;
  complete_if_over(lock, work);
}

/// A message nobody has asked for yet is copied, so that a send never waits for its receiver.
void LocalGroup::send(int rank, const Transfer& transfer, const std::string& where) {
  const ChannelKey key{rank, transfer.peer, transfer.tag};
  const Tensor& tensor = transfer.tensor;
  Message message{{}, tensor.dtype(), tensor.numel(), where};
  Lock lock(mutex_);
  const auto nobody_waits = [&] {
    const auto channel = channels_.find(key);
    return channel == channels_.end() || channel->second.receives.empty();
  };
  if (!aborted_ && nobody_waits()) {
    lock.unlock();
    const auto* bytes = static_cast<const std::byte*>(tensor.raw());
    message.bytes.assign(bytes, bytes + tensor.nbytes());
    lock.lock();
    if (!aborted_ && nobody_waits()) {
      channels_[key].messages.push_back(std::move(message));
      return;
    }
  }
  if (aborted_) return;
  const auto channel = channels_.find(key);
  Receive receive = std::move(channel->second.receives.front());
  channel->second.receives.pop_front();
  if (channel->second.receives.empty()) channels_.erase(channel);
  deliver(lock, key, message, tensor.raw(), std::move(receive));
}

void LocalGroup::receive(const std::shared_ptr<LocalExchange>& work, int rank, const Transfer& transfer,
                         const std::string& where) {
  const ChannelKey key{transfer.peer, rank, transfer.tag};
  Lock lock(mutex_);
  if (aborted_) return;
  const auto channel = channels_.find(key);
  Receive receive{work, transfer.tensor, where};
  if (channel == channels_.end() || channel->second.messages.empty()) {
    channels_[key].receives.push_back(std::move(receive));
    return;
  }
  const Message message = std::move(channel->second.messages.front());
  channel->second.messages.pop_front();
  if (channel->second.messages.empty()) channels_.erase(channel);
  deliver(lock, key, message, message.bytes.data(), std::move(receive));
}

/// Copies without holding the mutex. A message that does not fit ends the group: its sender may be gone on.
void LocalGroup::deliver(Lock& lock, const ChannelKey& key, const Message& message, const void* bytes,
                         Receive receive) {
  const auto [source, destination, tag] = key;
  const Tensor& target = receive.tensor;
  if (message.dtype != target.dtype() || message.count != target.numel()) {
    abort(lock, detail::concat("message with tag ", tag, " on group ", name_, ": rank ",
                               ranks_[static_cast<std::size_t>(source)], " sent ", message.count, " ",
                               message.dtype, " at ", message.where, ", rank ",
                               ranks_[static_cast<std::size_t>(destination)], " expected ", target.numel(),
                               " ", target.dtype(), " at ", receive.where));
    receive.work->changed.notify_all();  // in no channel any more, where abort would have found it
    return;
  }
  LocalExchange& work = *receive.work;
  ++work.copying;
  lock.unlock();
  if (target.nbytes() > 0) std::memcpy(target.raw(), bytes, target.nbytes());
  receive.tensor = {};  // before the wait can return
  lock.lock();
  --work.copying;
  work.awaited.erase(std::find(work.awaited.begin(), work.awaited.end(), source));
  complete_if_over(lock, receive.work);
}

/// Also wakes a wait that has to look again because nothing is being copied any more.
void LocalGroup::complete_if_over(Lock& lock, const std::shared_ptr<LocalExchange>& work) {
  if (!aborted_ && work->posted && work->awaited.empty() && !work->done) {
    const auto ready = Clock::now() + duration_of(options_.delay_s);
    std::string error;
    if (work->finished) {
      ++work->copying;
      lock.unlock();
      try {
        work->finished(seconds_of(ready));
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
      lock.lock();
      --work->copying;
    }
    work->error = std::move(error);
    work->ready = ready;
    work->done = true;
  }
  work->changed.notify_all();
}

}  // namespace tessera
