#include "comm/store_wire.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>

#include "comm/resolve.hpp"
#include "tessera/base/error.hpp"

namespace tessera::store {

namespace {

Socket open_socket(const addrinfo& address) {
  return Socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
}

}  // namespace

Deadline after(double seconds) {
  constexpr double kLongest = 1e8;  // three years
  const double bounded = std::isfinite(seconds) ? std::clamp(seconds, 0.0, kLongest) : kLongest;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30));
}

Digest random_nonce() {
  Digest nonce;
  TESSERA_ENSURE(IoError, RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), nonce.size()) == 1,
                 "the system gave no random bytes for the job's store");
  return nonce;
}

Digest proof_of(const std::string& secret, std::string_view who, const Digest& server_nonce,
                const Digest& client_nonce) {
  std::string message(kMagic);
  message.append(who);
  message.append(server_nonce.begin(), server_nonce.end());
  message.append(client_nonce.begin(), client_nonce.end());
  Digest digest;
  unsigned int length = 0;
  const auto* data = reinterpret_cast<const unsigned char*>(message.data());
  const auto* made = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), data, message.size(),
                          reinterpret_cast<unsigned char*>(digest.data()), &length);
  TESSERA_ENSURE(InternalError, made != nullptr && length == digest.size(), "HMAC-SHA256 failed");
  return digest;
}

bool equal_in_constant_time(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Writer& Writer::number(std::int64_t value) {
  for (int shift = 0; shift < 64; shift += 8)
    body_.push_back(static_cast<char>((static_cast<std::uint64_t>(value) >> shift) & 0xff));
  return *this;
}

Writer& Writer::text(std::string_view value) {
  number(static_cast<std::int64_t>(value.size()));
  body_.append(value);
  return *this;
}

std::string Writer::frame() const {
  std::string out;
  for (int shift = 0; shift < 32; shift += 8)
    out.push_back(static_cast<char>((body_.size() >> shift) & 0xff));
  return out + body_;
}

bool Reader::kind(char& value) {
  if (rest_.empty()) return false;
  value = rest_.front();
  rest_.remove_prefix(1);
  return true;
}

bool Reader::number(std::int64_t& value) {
  if (rest_.size() < 8) return false;
  std::uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= std::uint64_t{static_cast<unsigned char>(rest_[i])} << (8 * i);
  value = static_cast<std::int64_t>(bits);
  rest_.remove_prefix(8);
  return true;
}

bool Reader::text(std::string& value) {
  std::int64_t length = 0;
  if (!number(length) || length < 0 || static_cast<std::uint64_t>(length) > rest_.size()) return false;
  value.assign(rest_.substr(0, static_cast<std::size_t>(length)));
  rest_.remove_prefix(static_cast<std::size_t>(length));
  return true;
}

std::uint32_t frame_length(const char* four_bytes) {
  std::uint32_t length = 0;
  for (int i = 0; i < 4; ++i) length |= std::uint32_t{static_cast<unsigned char>(four_bytes[i])} << (8 * i);
  return length;
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

void Socket::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Socket listen_on(const std::string& address, std::uint16_t port) {
  constexpr double kLookupTimeout = 30;
  std::string reason;
  const Addresses found = resolve(address, std::to_string(port), after(kLookupTimeout), reason);
  for (const addrinfo* entry = found.get(); entry != nullptr; entry = entry->ai_next) {
    Socket socket = open_socket(*entry);
    const int on = 1;
    if (socket && setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 && ::listen(socket.get(), 1024) == 0) {
      return socket;
    }
    reason = std::strerror(errno);
  }
  detail::fail<IoError>(__FILE__, __LINE__, "",
                        detail::concat("the job's store cannot listen on ", address, " port ", port, ": ",
                                       reason.empty() ? "no such address" : reason));
}

std::uint16_t port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return address.ss_family == AF_INET6 ? ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port)
                                       : ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string address_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  std::array<char, NI_MAXHOST> text{};
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text.data(), text.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return {};
  }
  return text.data();
}

Socket connect_to(const std::string& address, std::uint16_t port, Deadline deadline, std::string& reason) {
  const Addresses found = resolve(address, std::to_string(port), deadline, reason);
  for (const addrinfo* entry = found.get(); entry != nullptr; entry = entry->ai_next) {
    Socket socket = open_socket(*entry);
    int error = errno;
    if (socket) {
      error = ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS) {
        pollfd wait{socket.get(), POLLOUT, 0};
        int ready = 0;
        do {
          ready = ::poll(&wait, 1, milliseconds_until(deadline));
        } while (ready < 0 && errno == EINTR);
        socklen_t length = sizeof error;
        if (ready == 0) error = ETIMEDOUT;
        if (ready > 0) getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    if (error == 0) {
      const int on = 1;
      setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      return socket;
    }
    reason = std::strerror(error);
  }
  return Socket();
}

}  // namespace tessera::store
