/// Somebody on the way between a store and its client.

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <thread>

#include "comm/store_wire.hpp"
#include "tessera/base/error.hpp"
#include "tests/comm/conformance.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {
namespace {

constexpr const char* kHere = "127.0.0.1";
constexpr const char* kSecret = "a secret of this job";

/// Passes on what store and client say, changed by `change`: who says it, the bytes, how many came before
/// them since the proofs. What it returns goes on; "hang up" ends both connections.
class OnTheWay {
 public:
  using Change = std::function<std::string(bool client, const std::string& bytes, std::size_t at)>;

  OnTheWay(std::uint16_t server, Change change)
      : server_(server), change_(std::move(change)), listener_(store::listen_on(kHere, 0)) {
    thread_ = std::thread([this] { work(); });
  }
  ~OnTheWay() {
    stop_ = true;
    thread_.join();
  }
  std::uint16_t port() const { return store::port_of(listener_); }

 private:
  struct End {
    store::Socket socket;
    std::size_t proofs;
    std::size_t passed = 0;
  };

  void work() {
    while (!stop_) {
      pollfd wait{listener_.get(), POLLIN, 0};
      if (::poll(&wait, 1, 20) != 1) continue;
      std::string reason;
      End client{store::Socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK)),
                 store::kProofBytes};
      End server{store::connect_to(kHere, server_, store::after(5), reason), store::kGreetingBytes + 32};
      while (!stop_ && pass(client, server)) {
      }
    }
  }

  bool pass(End& client, End& server) {
    std::array<pollfd, 2> waits{{{client.socket.get(), POLLIN, 0}, {server.socket.get(), POLLIN, 0}}};
    ::poll(waits.data(), 2, 20);
    return (waits[0].revents == 0 || pass_on(true, client, server)) &&
           (waits[1].revents == 0 || pass_on(false, server, client));
  }

  bool pass_on(bool from_client, End& from, const End& to) {
    std::array<char, 4096> piece{};
    const std::size_t most = from.passed < from.proofs ? from.proofs - from.passed : piece.size();
    const ssize_t got = ::recv(from.socket.get(), piece.data(), most, 0);
    if (got <= 0) return false;
    std::string bytes(piece.data(), static_cast<std::size_t>(got));
    if (from.passed >= from.proofs) bytes = change_(from_client, bytes, from.passed - from.proofs);
    from.passed += static_cast<std::size_t>(got);
    if (bytes == "hang up") return false;
    ::send(to.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    return true;
  }

  std::uint16_t server_;
  Change change_;
  store::Socket listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// One bit of one byte of what one side says.
OnTheWay::Change flip(bool client, std::size_t place, char bit = 8) {
  return [=](bool from_client, const std::string& bytes, std::size_t at) {
    std::string changed = bytes;
    if (from_client == client && place >= at && place < at + bytes.size())
      changed[place - at] = static_cast<char>(changed[place - at] ^ bit);
    return changed;
  };
}

class StoreSeal : public testing::Test {
 protected:
  /// What a client is told whose connection is changed; the store must be none the worse.
  std::string told(const OnTheWay::Change& change, double timeout_s = 10) {
    const OnTheWay middle(server_.port(), change);
    Store store(kHere, middle.port(), kSecret, 10);
    const std::string message =
        message_of<CommunicationError>([&] { store.set("key", "changed", timeout_s); });
    std::string value;
    EXPECT_FALSE(other_.try_get("key", value)) << value;
    return message;
  }
  const StoreServer server_{kHere, 0, kSecret};
  Store other_{kHere, server_.port(), kSecret, 10};
};

/// A set's frame: 4 bytes length, 1 operation, 8 + 3 key, 8 + 7 value, 32 MAC.
constexpr std::size_t kRequestBytes = 4 + 1 + 8 + 3 + 8 + 7 + 32;

TEST_F(StoreSeal, AChangedRequestIsRefusedWhereverItWasChanged) {
  for (std::size_t place = 4; place < kRequestBytes; ++place) {
    const std::string message = told(flip(true, place));
    EXPECT_TRUE(contains(message, "a request was changed on its way")) << place << ": " << message;
  }
}

/// Shorter: what follows does not fit. Longer: nothing follows. Longer than anything: refused at once.
TEST_F(StoreSeal, AChangedLengthIsRefused) {
  static_assert((kRequestBytes - 4 - 32) % 16 >= 8);  // without this bit it is shorter
  EXPECT_TRUE(contains(told(flip(true, 0)), "a request was changed on its way"));
  EXPECT_TRUE(contains(told(flip(true, 3)), "a request was changed on its way"));
  EXPECT_TRUE(contains(told(flip(true, 1), 0.2), "no answer in time"));
}

TEST_F(StoreSeal, AChangedAnswerIsRefused) {
  // An answer's frame: 4 bytes length, 1 outcome, 8 text, 32 MAC.
  for (std::size_t place = 4; place < 4 + 1 + 8 + 32; ++place) {
    const OnTheWay middle(server_.port(), flip(false, place));
    Store store(kHere, middle.port(), kSecret, 10);
    const std::string message = message_of<CommunicationError>([&] { store.set("key", "right"); });
    EXPECT_TRUE(contains(message, "an answer was changed on its way")) << place << ": " << message;
  }
}

TEST_F(StoreSeal, ARepeatedRequestIsDoneOnce) {
  const OnTheWay twice(server_.port(), [](bool client, const std::string& bytes, std::size_t at) {
    return client && at == 0 ? bytes + bytes : bytes;
  });
  Store store(kHere, twice.port(), kSecret, 10);
  EXPECT_EQ(store.add("n", 1), 1);
  const std::string message = message_of<CommunicationError>([&] { store.add("n", 10); });
  EXPECT_TRUE(contains(message, "a request was changed on its way")) << message;
  EXPECT_EQ(other_.add("n", 0), 1);
  EXPECT_EQ(store.add("n", 0), 1);  // on a new connection
}

TEST_F(StoreSeal, ARequestCutOffIsNotDone) {
  const auto half = [](bool client, const std::string& bytes, std::size_t at) {
    return client && at == 0 ? bytes.substr(0, bytes.size() / 2) : client ? std::string("hang up") : bytes;
  };
  EXPECT_TRUE(contains(told(half, 0.2), "no answer in time"));
  const auto gone = [](bool client, const std::string& bytes, std::size_t) {
    return client ? std::string("hang up") : bytes;
  };
  EXPECT_TRUE(contains(told(gone), "the connection was lost"));
}

TEST(Seal, FitsOneFrameOfOneConnectionAndDirectionOnly) {
  const store::Digest a{1}, b{2};
  store::Seal sender("secret", "client", a, b), receiver("secret", "client", a, b);
  const std::string first = sender.frame_of("body"), second = sender.frame_of("body");
  EXPECT_NE(first, second);
  const auto parts = [](const std::string& frame) {
    return std::pair(std::string_view(frame).substr(4, 4), std::string_view(frame).substr(8));
  };
  const auto [body, mac] = parts(first);
  const auto [next_body, next_mac] = parts(second);
  EXPECT_FALSE(receiver.fits(next_body, next_mac));  // one is missing
  EXPECT_FALSE(receiver.fits("Body", mac));
  EXPECT_FALSE(receiver.fits(body, mac.substr(1)));
  EXPECT_FALSE(store::Seal("secret", "server", a, b).fits(body, mac));
  EXPECT_FALSE(store::Seal("secret", "client", b, a).fits(body, mac));
  EXPECT_FALSE(store::Seal("terces", "client", a, b).fits(body, mac));
  EXPECT_TRUE(receiver.fits(body, mac));
  EXPECT_FALSE(receiver.fits(body, mac));  // again
  EXPECT_TRUE(receiver.fits(next_body, next_mac));
}

TEST_F(StoreSeal, KeysForOtherPurposesAreOthers) {
  const Store same(kHere, server_.port(), kSecret, 10);
  EXPECT_EQ(other_.key_for("a").size(), 32u);
  EXPECT_EQ(other_.key_for("a"), same.key_for("a"));
  EXPECT_NE(other_.key_for("a"), other_.key_for("b"));
  const StoreServer another(kHere, 0, "another secret");
  EXPECT_NE(other_.key_for("a"), Store(kHere, another.port(), "another secret", 10).key_for("a"));
}

}  // namespace
}  // namespace tessera::test
