/// How a GlooFabric comes to be: an address, a connection to every other rank, everybody's name.

#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <exception>

#include "comm/gloo_fabric.hpp"
#include "comm/gloo_pairs.hpp"
#include "comm/gloo_peers.hpp"
#include "comm/gloo_signals.hpp"
#include "comm/resolve.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

namespace {

constexpr std::uint64_t kNamesSlot = 2;
/// Of Gloo's own waits, which all get another one: a timeout there closes every connection.
constexpr auto kGlooTimeout = std::chrono::milliseconds(std::chrono::hours(1));
const GlooCall kSetUp{.operation = "set-up", .collective = true, .sequence = 0, .where = {}};

/// "4711 10.0.0.1".
std::pair<std::string, std::uint16_t> place_of(const std::string& text) {
  std::uint16_t port = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, port);
  TESSERA_ENSURE(CommunicationError, error == std::errc() && stop != end && *stop == ' ',
                 "the job's store holds '", text, "' for a rank's address");
  return {text.substr(static_cast<std::size_t>(stop - text.data()) + 1), port};
}

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

std::shared_ptr<gloo::transport::Device> open_device(const std::string& address, const std::string& number) {
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

/// The address stands in the store when this rank joins, so that nobody who has joined waits for it.
void GlooFabric::connect(const GlooOptions& options) {
  const double timeout_s = options.comm.timeout_s;
  const std::string address =
      numeric_address(options.address.empty() ? store_->local_address() : options.address, timeout_s);
  device_ = open_device(options.address.empty() ? address : options.address, address);
  Peers peers({.rank = rank_,
               .size = size_,
               .address = address,
               .job = job_,
               .key = store_->key_for("connections between ranks"),
               .name = own_name(),
               .timeout_s = timeout_s});
  const auto address_key = [&](int rank) { return key(detail::concat("address/", rank)); };
  store_->set(address_key(rank_), detail::concat(peers.port(), " ", address));
  store_->barrier(key("join"), rank_, size_, timeout_s);
  std::vector<std::pair<std::string, std::uint16_t>> lower;
  for (int peer = 0; peer < rank_; ++peer)
    lower.push_back(place_of(store_->get(address_key(peer), timeout_s)));
  std::vector<store::Socket> sockets = peers.connect(lower);
  const PipeSignalBlocked signal;
  try {
    context_ = make_gloo_context(device_, rank_, std::move(sockets), kGlooTimeout);
  } catch (const std::exception& error) {
    detail::fail<CommunicationError>(__FILE__, __LINE__, "",
                                     detail::concat("rank ", rank_, " of ", size_, " (", own_name(),
                                                    ") could not connect to the others: ", error.what()));
  }
  goodbyes_.resize(static_cast<std::size_t>(size_));
  goodbye_buffer_ = context_->createUnboundBuffer(goodbyes_.data(), goodbyes_.size());
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
  store_->remove(key(detail::concat("address/", rank_)));
}

}  // namespace tessera
