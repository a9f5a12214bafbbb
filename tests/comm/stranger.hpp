#pragma once
/// Connections that say wrong things to a store or to a rank, on this machine.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <string>

#include "comm/store_wire.hpp"

namespace tessera::test {

/// A bare connection.
class Stranger {
 public:
  explicit Stranger(std::uint16_t port) {
    std::string reason;
    socket_ = store::connect_to("127.0.0.1", port, store::after(5), reason);
    EXPECT_TRUE(socket_) << reason;
    timeval limit{8, 0};
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) & ~O_NONBLOCK);
  }
  void say(const std::string& bytes) const {
    ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  /// Everything until the server hangs up, or so many bytes.
  std::string hear(std::size_t most = 1 << 20) const {
    std::string all;
    std::array<char, 512> piece{};
    while (all.size() < most) {
      const ssize_t got = ::recv(socket_.get(), piece.data(), std::min(piece.size(), most - all.size()), 0);
      if (got <= 0) break;
      all.append(piece.data(), static_cast<std::size_t>(got));
    }
    return all;
  }
  void hang_up() { socket_.close(); }

 private:
  store::Socket socket_;
};

/// A connection to a store that has proved itself.
class Introduced : public Stranger {
 public:
  Introduced(const StoreServer& server, const std::string& secret) : Stranger(server.port()) {
    const std::string greeting = hear(store::kGreetingBytes);
    EXPECT_EQ(greeting.size(), store::kGreetingBytes);
    store::Digest theirs{}, own{};
    std::memcpy(theirs.data(), greeting.data() + store::kMagic.size(), theirs.size());
    const store::Digest proof = store::proof_of(secret, "client", theirs, own);
    say(std::string(own.begin(), own.end()) + std::string(proof.begin(), proof.end()));
    const std::string answer = hear(32);
    const store::Digest expected = store::proof_of(secret, "server", theirs, own);
    EXPECT_EQ(answer, std::string(expected.begin(), expected.end()));
    seal_ = store::Seal(secret, "client", theirs, own);
  }
  void request(const std::string& body) { say(seal_.frame_of(body)); }

 private:
  store::Seal seal_;
};

}  // namespace tessera::test
