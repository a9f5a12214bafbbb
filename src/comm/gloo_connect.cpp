/// How a GlooFabric comes to be: an address, a connection to every other rank, everybody's name.

#include <gloo/rendezvous/store.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <exception>

#include "comm/gloo_fabric.hpp"
#include "comm/gloo_signals.hpp"
#include "comm/resolve.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

namespace {

constexpr std::uint64_t kNamesSlot = 2;
const GlooCall kSetUp{.operation = "set-up", .collective = true, .sequence = 0, .where = {}};

/// Gloo's view of our store.
class StoreForGloo : public gloo::rendezvous::Store {
 public:
  /// `keys` gets the names of what is stored.
  StoreForGloo(tessera::Store& store, std::string prefix, double timeout_s, std::vector<std::string>& keys)
      : store_(store), prefix_(std::move(prefix)), deadline_(store::after(timeout_s)), keys_(keys) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(prefix_ + key, std::string(data.begin(), data.end()));
    keys_.push_back(prefix_ + key);
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = store_.get(prefix_ + key, store::milliseconds_until(deadline_) / 1000.0);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }

 private:
  tessera::Store& store_;
  std::string prefix_;
  store::Deadline deadline_;
  std::vector<std::string>& keys_;
};

/// Gloo does not survive a name that cannot be resolved: it gets numbers only.
std::string numeric_address(const std::string& address, double timeout_s) {
  std::string reason;
  const store::Addresses found = store::resolve(address, "0", store::after(timeout_s), reason);
  TESSERA_ENSURE(IoError, found != nullptr, "the address of this process, '", address,
                 "', cannot be resolved: ", reason, " (TESSERA_COMM_ADDRESS)");
  std::array<char, NI_MAXHOST> text{};
  const int result =
      getnameinfo(found->ai_addr, found->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  TESSERA_ENSURE(IoError, result == 0, "the address of this process, '", address, "', has no number");
  return text.data();
}

std::shared_ptr<gloo::transport::Device> open_device(const std::string& address, double timeout_s) {
  const std::string number = numeric_address(address, timeout_s);
  try {
    const SignalsBlocked signals;  // inherited by the thread this starts
    gloo::transport::tcp::attr attributes;
    attributes.hostname = number;
    return gloo::transport::tcp::CreateDevice(attributes);
  } catch (const std::exception& error) {
    detail::fail<IoError>(
        __FILE__, __LINE__, "",
        detail::concat("cannot use ", address, " (", number, ") as the address of this process (",
                       "TESSERA_COMM_ADDRESS): ", error.what()));
  }
}

std::string own_name() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), HOST_NAME_MAX);
  return detail::concat("host ", host.data(), ", process ", ::getpid());
}

}  // namespace

void GlooFabric::connect(const GlooOptions& options) {
  device_ = open_device(options.address.empty() ? store_->local_address() : options.address,
                        options.comm.timeout_s);
  StoreForGloo keys(*store_, key("gloo/"), options.comm.timeout_s, set_up_keys_);
  context_ = std::make_shared<gloo::rendezvous::Context>(rank_, size_);
  // Gloo waits five times as long for a connection.
  context_->setTimeout(std::chrono::milliseconds(
      static_cast<std::int64_t>(std::clamp(options.comm.timeout_s * 1000 / 5, 1.0, 1e9))));
  try {
    const PipeSignalBlocked signal;
    context_->connectFullMesh(keys, device_);
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    detail::fail<CommunicationError>(__FILE__, __LINE__, "",
                                     detail::concat("rank ", rank_, " of ", size_, " (", own_name(),
                                                    ") could not connect to the others: ", error.what()));
  }
  goodbyes_.resize(static_cast<std::size_t>(size_));
  goodbye_buffer_ = context_->createUnboundBuffer(goodbyes_.data(), goodbyes_.size());
  const PipeSignalBlocked signal;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      goodbye_buffer_->recv(peer, kGoodbyeSlot, static_cast<std::size_t>(peer), 1);
    } catch (const std::exception&) {
      lost_.insert(peer);
    }
  }
}

/// Everybody has connected to everybody when this is done.
void GlooFabric::exchange_names(double timeout_s) {
  names_.resize(static_cast<std::size_t>(size_));
  const std::string own = own_name();
  auto& mine = names_[static_cast<std::size_t>(rank_)];
  std::copy_n(own.begin(), std::min(own.size(), mine.size() - 1), mine.begin());
  std::vector<int> all(static_cast<std::size_t>(size_));
  for (int r = 0; r < size_; ++r) all[static_cast<std::size_t>(r)] = r;
  const auto group = std::make_shared<GlooGroup>(0, "world", all);
  std::vector<GlooMessage> messages;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto& theirs = names_[static_cast<std::size_t>(peer)];
    messages.push_back(
        post(GlooMessage::Kind::recv, peer, kNamesSlot, theirs.data(), theirs.size(), group, kSetUp));
    messages.push_back(
        post(GlooMessage::Kind::send, peer, kNamesSlot, mine.data(), mine.size(), group, kSetUp));
  }
  for (GlooMessage& message : messages) wait(message, group, kSetUp, timeout_s, true);
  for (const std::string& used : set_up_keys_) store_->remove(used);
}

}  // namespace tessera
