#include "comm/gloo_pairs.hpp"

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>

#include "tessera/base/error.hpp"
#include "tessera/comm/store.hpp"

namespace tessera {

namespace tcp = gloo::transport::tcp;

namespace {

/// Holds up the thread that serves Gloo's sockets, for as long as this lives.
class HeldLoop : public tcp::Handler {
 public:
  explicit HeldLoop(tcp::Device& device) : device_(device) {
    raised_.raise();
    device_.registerDescriptor(raised_.descriptor(), EPOLLIN, this);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_; });
  }
  /// Waits for the handler itself: Gloo's own wait for its loop may end early.
  ~HeldLoop() override {
    {
      std::unique_lock lock(mutex_);
      over_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !held_; });
    }
    device_.unregisterDescriptor(raised_.descriptor(), this);
  }
  HeldLoop(const HeldLoop&) = delete;
  HeldLoop& operator=(const HeldLoop&) = delete;

  void handleEvents(int /*events*/) override {
    std::unique_lock lock(mutex_);
    raised_.wait(0);
    held_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return over_; });
    held_ = false;
    changed_.notify_all();
  }

 private:
  tcp::Device& device_;
  Interrupt raised_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false, over_ = false;
};

/// Gloo's pair listens for its peer as soon as it is made, and takes whoever comes first. This one drops that
/// socket while the loop is held, so that nobody can have come, and goes on with the connection it is given.
class ConnectedPair : public tcp::Pair {
 public:
  ConnectedPair(tcp::Context* context, tcp::Device* device, int peer, std::chrono::milliseconds timeout,
                store::Socket& socket)
      : tcp::Pair(context, device, peer, timeout) {
    const std::lock_guard lock(m_);
    ::close(fd_);  // which also takes it out of the loop
    fd_ = socket.get();
    try {
      handleConnected();
    } catch (...) {
      fd_ = -1;  // still the caller's
      throw;
    }
    socket.release();
  }
};

class ConnectedContext : public tcp::Context {
 public:
  ConnectedContext(std::shared_ptr<tcp::Device> device, int rank, std::vector<store::Socket> sockets,
                   std::chrono::milliseconds timeout)
      : tcp::Context(device, rank, static_cast<int>(sockets.size())) {
    setTimeout(timeout);
    const HeldLoop held(*device);
    for (std::size_t peer = 0; peer < sockets.size(); ++peer) {
      if (!sockets[peer]) continue;
      pairs_[peer] =
          std::make_unique<ConnectedPair>(this, device.get(), static_cast<int>(peer), timeout, sockets[peer]);
    }
  }
};

}  // namespace

std::shared_ptr<gloo::transport::Context> make_gloo_context(
    const std::shared_ptr<gloo::transport::Device>& device, int rank, std::vector<store::Socket> sockets,
    std::chrono::milliseconds timeout) {
  auto of_tcp = std::dynamic_pointer_cast<tcp::Device>(device);
  TESSERA_ENSURE(InternalError, of_tcp != nullptr, "Gloo's device is not one for TCP");
  return std::make_shared<ConnectedContext>(std::move(of_tcp), rank, std::move(sockets), timeout);
}

}  // namespace tessera
