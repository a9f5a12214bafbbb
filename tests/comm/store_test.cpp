#include "tessera/comm/store.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "comm/resolve.hpp"
#include "comm/store_wire.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/timeout.hpp"
#include "tests/comm/stranger.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

using test::contains;
using test::Introduced;
using test::Stranger;

using Clock = std::chrono::steady_clock;

constexpr const char* kHere = "127.0.0.1";
constexpr const char* kSecret = "a secret of this job";

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

using test::message_of;

class StoreTest : public testing::Test {
 protected:
  std::unique_ptr<Store> client(double timeout_s = 10) const {
    return std::make_unique<Store>(kHere, server_.port(), kSecret, timeout_s);
  }
  void expect_unharmed() const {
    const auto store = client();
    store->set("unharmed", "yes");
    EXPECT_EQ(store->get("unharmed", 1), "yes");
  }
  const StoreServer server_{kHere, 0, kSecret, {.proof_timeout_s = 0.4, .most_unproved = 32}};
};

TEST_F(StoreTest, KeepsValues) {
  const auto a = client(), b = client();
  std::string value = "untouched";
  EXPECT_FALSE(b->try_get("key", value));
  EXPECT_EQ(value, "untouched");
  a->set("key", "one");
  a->set("", std::string("\0\n\xff", 3));
  EXPECT_EQ(b->get("key", 1), "one");
  EXPECT_EQ(b->get("", 1), std::string("\0\n\xff", 3));
  a->set("key", "");
  EXPECT_EQ(b->get("key", 1), "");
  a->remove("key");
  a->remove("never there");
  EXPECT_FALSE(b->try_get("key", value));
  EXPECT_EQ(a->local_address(), kHere);
}

TEST(Store, CountsWhomItTurnsAway) {
  const auto come = [](const StoreServer& server, const std::string& secret) {
    return message_of<CommunicationError>([&] { Store(kHere, server.port(), secret, 10); });
  };
  const StoreServer none(kHere, 0, kSecret), some(kHere, 0, kSecret, {.counted_secret = "known"});
  EXPECT_TRUE(contains(come(none, "other"), "does not know this job's secret"));
  EXPECT_TRUE(contains(come(some, "other"), "does not know this job's secret"));
  EXPECT_EQ(some.turned_away(), 0);
  EXPECT_TRUE(contains(come(some, "known"), "does not know this job's secret"));
  EXPECT_GT(some.turned_away(), 0);
  EXPECT_TRUE(contains(come(none, "known"), "does not know this job's secret"));
  EXPECT_EQ(none.turned_away(), 0);
  EXPECT_EQ(come(some, kSecret), come(none, kSecret));  // both let it in
}

TEST_F(StoreTest, Counts) {
  const auto a = client(), b = client();
  EXPECT_EQ(a->add("n", 5), 5);
  EXPECT_EQ(b->add("n", -7), -2);
  EXPECT_EQ(a->get("n", 1), "-2");
  EXPECT_EQ(a->add("n", 0), -2);
  a->set("word", "12x");
  EXPECT_TRUE(
      contains(message_of<CommunicationError>([&] { a->add("word", 1); }), "'word' does not hold a number"));
  EXPECT_EQ(a->add("n", 3), 1);  // the connection is as good as before
}

TEST_F(StoreTest, GetWaitsUntilTheKeyIsThere) {
  const auto a = client(), b = client();
  std::thread setter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    b->set("late", "value");
  });
  const auto begin = Clock::now();
  EXPECT_EQ(a->get("late", 10), "value");
  EXPECT_GT(seconds_since(begin), 0.05);
  setter.join();
}

TEST_F(StoreTest, DeadlinesNameTheKey) {
  const auto a = client();
  const auto begin = Clock::now();
  const std::string message = message_of<CommunicationError>([&] { a->get("rank 3's address", 0.1); });
  EXPECT_TRUE(contains(message, "nobody has set 'rank 3's address' within 0.1 s")) << message;
  EXPECT_TRUE(contains(message, "127.0.0.1 port " + std::to_string(server_.port()))) << message;
  EXPECT_LT(seconds_since(begin), 2);
  a->set("x", "1");
  EXPECT_EQ(a->get("x", 1), "1");
}

TEST_F(StoreTest, AWaitCanBeInterrupted) {
  const auto a = client();
  const Interrupt interrupt;
  std::string value;
  EXPECT_FALSE(a->wait_for("k", value, 0.02, interrupt));
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
    interrupt.raise();
  });
  const auto begin = Clock::now();
  EXPECT_FALSE(a->wait_for("k", value, 20, interrupt));
  EXPECT_LT(seconds_since(begin), 5);
  other.join();
  EXPECT_TRUE(interrupt.wait(0));
  EXPECT_FALSE(interrupt.wait(0));
  a->set("k", "v");
  EXPECT_TRUE(a->wait_for("k", value, 1, interrupt));
  EXPECT_EQ(value, "v");
}

TEST_F(StoreTest, ThreadsShareAClient) {
  const auto a = client();
  std::thread waiting([&] { EXPECT_EQ(a->get("go", 10), "now"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(a->add("others go on", 1), 1);
  a->set("go", "now");
  waiting.join();
}

TEST_F(StoreTest, LargeValuesAndTheLimit) {
  const auto a = client(), b = client();
  std::string large(kStoreTextLimit, 'x');
  for (std::size_t i = 0; i < large.size(); i += 7) large[i] = static_cast<char>(i * 31);
  a->set(large, large);
  EXPECT_EQ(b->get(large, 5), large);
  const std::string larger = large + "!";
  EXPECT_TRUE(
      contains(message_of<InvalidArgument>([&] { a->set("k", larger); }), "a value of 1048577 bytes"));
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { a->get(larger, 1); }), "a key of 1048577 bytes"));
  EXPECT_EQ(b->get(large, 5), large);
}

TEST_F(StoreTest, BarrierLetsAllThroughTogether) {
  constexpr int kSize = 5;
  std::atomic<int> arrived{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto store = client();
      for (int round = 1; round <= 3; ++round) {  // one name again and again
        ++arrived;
        store->barrier("b", rank, kSize, 10);
        EXPECT_EQ(arrived.load(), round * kSize);
        store->barrier("between", rank, kSize, 10);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST_F(StoreTest, BarrierListsWhoIsMissing) {
  std::string first;
  std::thread rank1([&] {
    const auto store = client();
    first = message_of<CommunicationError>([&] { store->barrier("start", 1, 5, 0.2); });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(40));
  const auto store = client();
  const std::string second = message_of<CommunicationError>([&] { store->barrier("start", 3, 5, 0.4); });
  rank1.join();
  EXPECT_EQ(first, "barrier 'start' of 5 ranks: after 0.2 s these ranks have not come: 0, 2, 4");
  EXPECT_EQ(second,
            "barrier 'start' of 5 ranks: after 0.4 s these ranks have not come: 0, 2, 4; came and left: 1");
}

TEST_F(StoreTest, BarrierRefusesContradictions) {
  const auto a = client(), b = client();
  std::thread waiting([&] { message_of<CommunicationError>([&] { a->barrier("b", 0, 3, 0.3); }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_TRUE(contains(message_of<CommunicationError>([&] { b->barrier("b", 0, 3, 1); }),
                       "two processes have this rank"));
  EXPECT_TRUE(contains(message_of<CommunicationError>([&] { b->barrier("b", 1, 4, 1); }),
                       "is for 3 ranks; rank 1 came for 4"));
  EXPECT_THROW(b->barrier("b", 4, 4, 1), InvalidArgument);
  waiting.join();
}

TEST_F(StoreTest, ALostClientsRequestsVanish) {
  {
    const auto lost = client();
    std::thread waiting([&] {
      const Interrupt interrupt;
      std::string value;
      interrupt.raise();  // hangs up while the request is parked
      EXPECT_FALSE(lost->wait_for("key", value, 30, interrupt));
    });
    waiting.join();
    Introduced stranger(server_, kSecret);
    stranger.request(store::Writer(static_cast<char>(store::Operation::barrier))
                         .text("b")
                         .number(0)
                         .number(2)
                         .number(60000)
                         .body());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stranger.hang_up();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const auto store = client();
  const std::string message = message_of<CommunicationError>([&] { store->barrier("b", 1, 2, 0.1); });
  EXPECT_TRUE(contains(message, "have not come: 0")) << message;
  store->set("key", "v");
  expect_unharmed();
}

TEST_F(StoreTest, SixtyFourClientsAtOnce) {
  constexpr int kClients = 64;
  std::vector<std::thread> ranks;
  std::atomic<int> good{0};
  for (int rank = 0; rank < kClients; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto store = client(20);
      store->set("rank " + std::to_string(rank), std::to_string(rank * rank));
      const int other = (rank + 17) % kClients;
      if (store->get("rank " + std::to_string(other), 20) == std::to_string(other * other)) ++good;
      store->barrier("all", rank, kClients, 20);
      store->add("sum", rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(good, kClients);
  EXPECT_EQ(client()->get("sum", 1), std::to_string(kClients * (kClients - 1) / 2));
}

/// A server that lets a proof lie, as on a busy machine, has not refused it.
TEST(StoreServerTest, ASlowServerIsNotTakenForOneThatRefuses) {
  const store::Socket listener = store::listen_on(kHere, 0);
  std::thread slow([&] {  // greets, and says nothing to the proof
    const store::Socket client(::accept(listener.get(), nullptr, nullptr));
    const std::string greeting = std::string(store::kMagic) + std::string(32, 'n');
    ::send(client.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
    std::array<char, 512> heard{};
    while (::recv(client.get(), heard.data(), heard.size(), 0) > 0) continue;
  });
  const std::string message =
      message_of<CommunicationTimeout>([&] { Store(kHere, store::port_of(listener), kSecret, 0.3); });
  EXPECT_TRUE(contains(message, "cannot be reached in time")) << message;
  slow.join();
}

TEST_F(StoreTest, WhoWaitsLooksAroundAndMayBeInterrupted) {
  int looks = 0;
  Store store(kHere, server_.port(), kSecret, 10, [&] {
    if (++looks == 3) throw std::runtime_error("Ctrl-C");
  });
  const auto begin = Clock::now();
  EXPECT_EQ(message_of<std::runtime_error>([&] { store.get("never", 100); }), "Ctrl-C");
  EXPECT_LT(seconds_since(begin), 30);
  store.set("key", "value");  // on another connection
  EXPECT_EQ(store.get("key", 1), "value");
}

/// getaddrinfo itself may take minutes where a name server is gone.
TEST(Resolve, AResolverThatHangsCostsNoMoreThanTheDeadline) {
  static std::atomic<bool> done{false};
  const auto hangs = [](const char*, const char*, const addrinfo*, addrinfo**) {
    while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return EAI_AGAIN;
  };
  const auto begin = Clock::now();
  std::string reason;
  EXPECT_EQ(store::resolve("a.host", "1", store::after(0.2), reason, hangs), nullptr);
  EXPECT_LT(seconds_since(begin), 10);
  EXPECT_TRUE(contains(reason, "'a.host' was not resolved in time")) << reason;
  EXPECT_NE(store::resolve("127.0.0.1", "1", store::after(0.2), reason, hangs), nullptr);  // asks nobody
  done = true;
  EXPECT_EQ(store::resolve("a.host", "1", store::after(20), reason, hangs), nullptr);
  EXPECT_EQ(reason, gai_strerror(EAI_AGAIN));
  EXPECT_NE(store::resolve("localhost", "1", store::after(20), reason), nullptr);
}

TEST_F(StoreTest, AWrongSecretGetsNoAnswer) {
  const auto begin = Clock::now();
  const std::string message =
      message_of<CommunicationError>([&] { Store(kHere, server_.port(), "another secret", 10); });
  EXPECT_TRUE(contains(message, "does not know this job's secret")) << message;
  EXPECT_LT(seconds_since(begin), 5);

  Stranger stranger(server_.port());
  EXPECT_EQ(stranger.hear(store::kGreetingBytes).size(), store::kGreetingBytes);
  stranger.say(std::string(store::kProofBytes, 'p'));
  EXPECT_EQ(stranger.hear(), "");  // hung up without a byte
  expect_unharmed();
}

/// The server's own words must not serve as a client's proof.
TEST_F(StoreTest, ProofsAreNotInterchangeable) {
  const store::Digest a = store::random_nonce(), b = store::random_nonce();
  EXPECT_FALSE(store::equal_in_constant_time(a, b));
  EXPECT_FALSE(store::equal_in_constant_time(store::proof_of("s", "client", a, b),
                                             store::proof_of("s", "server", a, b)));
  EXPECT_FALSE(store::equal_in_constant_time(store::proof_of("s", "client", a, b),
                                             store::proof_of("s", "client", b, a)));
  EXPECT_FALSE(store::equal_in_constant_time(store::proof_of("s", "client", a, b),
                                             store::proof_of("t", "client", a, b)));
  EXPECT_TRUE(store::equal_in_constant_time(store::proof_of("s", "client", a, b),
                                            store::proof_of("s", "client", a, b)));
}

TEST_F(StoreTest, ANonceIsUsedOnce) {
  Stranger one(server_.port()), two(server_.port());
  EXPECT_NE(one.hear(store::kGreetingBytes), two.hear(store::kGreetingBytes));
}

/// A server that does not know the secret is not believed.
TEST_F(StoreTest, AClientAsksForTheServersProof) {
  const store::Socket listener = store::listen_on(kHere, 0);
  std::atomic<bool> stop{false};
  std::thread impostor([&] {
    while (!stop) {
      const store::Socket socket(::accept4(listener.get(), nullptr, nullptr, 0));
      if (!socket) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      const std::string greeting = std::string(store::kMagic) + std::string(32, 'n');
      ::send(socket.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
      std::array<char, store::kProofBytes> proof{};
      ::recv(socket.get(), proof.data(), proof.size(), MSG_WAITALL);
      ::send(socket.get(), std::string(32, 'q').data(), 32, MSG_NOSIGNAL);
    }
  });
  const std::string message =
      message_of<CommunicationError>([&] { Store(kHere, store::port_of(listener), kSecret, 5); });
  stop = true;
  impostor.join();
  EXPECT_TRUE(contains(message, "does not know this job's secret")) << message;
}

TEST_F(StoreTest, GarbageDoesNoHarm) {
  const auto other = client();
  std::mt19937 random(7);
  for (int i = 0; i < 40; ++i) {
    Stranger stranger(server_.port());
    std::string bytes(random() % 300, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    stranger.say(bytes);
    if (i % 2) stranger.hear(store::kGreetingBytes);
    EXPECT_EQ(other->add("n", 1), i + 1);
  }
  for (int i = 0; i < 60; ++i) {  // after a good proof
    Introduced stranger(server_, kSecret);
    std::string body(random() % 64, '\0');
    for (char& byte : body) byte = static_cast<char>(random());
    if (!body.empty()) body[0] = static_cast<char>(random() % 7);
    stranger.request(store::Writer(body.empty() ? '\0' : body[0]).text(body).body());
    EXPECT_EQ(other->add("n", 1), 41 + i);
  }
  expect_unharmed();
}

/// A length that nobody may announce: refused before memory is taken for it.
TEST_F(StoreTest, AnEndlessFrameIsRefused) {
  const auto begin = Clock::now();
  for (const std::string& length : {std::string("\xff\xff\xff\xff"), std::string("\x41\x00\x20\x00", 4)}) {
    const Introduced stranger(server_, kSecret);
    stranger.say(length);
    EXPECT_TRUE(contains(stranger.hear(), "its MAC does not fit"));
  }
  // Lengths inside a frame that reach out of it.
  for (const std::int64_t length : {std::int64_t{-1}, std::int64_t{5}, std::int64_t{1} << 62}) {
    Introduced stranger(server_, kSecret);
    stranger.request(store::Writer(static_cast<char>(store::Operation::remove)).number(length).body());
    EXPECT_EQ(stranger.hear(), "");
  }
  EXPECT_LT(seconds_since(begin), 5);  // hung up at once
  expect_unharmed();
}

TEST_F(StoreTest, SilentConnectionsAreDropped) {
  const auto begin = Clock::now();
  Stranger silent(server_.port()), half(server_.port());
  half.say(std::string(store::kProofBytes / 2, 'h'));
  EXPECT_EQ(silent.hear().size(), store::kGreetingBytes);
  EXPECT_EQ(half.hear().size(), store::kGreetingBytes);
  EXPECT_GT(seconds_since(begin), 0.2);
  EXPECT_LT(seconds_since(begin), 5);
  expect_unharmed();
}

TEST_F(StoreTest, ManySilentConnectionsKeepNobodyOut) {
  std::vector<Stranger> crowd;
  for (int i = 0; i < 60; ++i) crowd.emplace_back(server_.port());
  expect_unharmed();
  EXPECT_EQ(crowd.front().hear().size(), store::kGreetingBytes);  // pushed out
}

TEST(StoreServerTest, ClientsLearnThatItIsGone) {
  auto server = std::make_unique<StoreServer>(kHere, 0, kSecret);
  Store store(kHere, server->port(), kSecret, 5);
  std::string message;
  std::thread waiting([&] { message = message_of<CommunicationError>([&] { store.get("never", 60); }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto begin = Clock::now();
  server.reset();
  waiting.join();
  EXPECT_LT(seconds_since(begin), 5);
  EXPECT_TRUE(contains(message, "the connection was lost")) << message;
}

TEST(StoreServerTest, ClientsWaitForItToComeUp) {
  std::uint16_t port = 0;
  { port = StoreServer(kHere, 0, kSecret).port(); }
  std::thread client([&] { Store(kHere, port, kSecret, 10).set("k", "v"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const StoreServer server(kHere, port, kSecret);
  client.join();
  EXPECT_EQ(Store(kHere, port, kSecret, 5).get("k", 1), "v");
}

TEST(StoreServerTest, NobodyThere) {
  std::uint16_t port = 0;
  { port = StoreServer(kHere, 0, kSecret).port(); }
  const auto begin = Clock::now();
  const std::string message = message_of<CommunicationError>([&] { Store(kHere, port, kSecret, 0.2); });
  EXPECT_TRUE(contains(message, "cannot be reached in time: Connection refused")) << message;
  EXPECT_LT(seconds_since(begin), 3);
}

TEST(StoreServerTest, BindsTheGivenAddressOnly) {
  const StoreServer server("127.0.0.2", 0, kSecret);
  Store("127.0.0.2", server.port(), kSecret, 5).set("k", "v");
  EXPECT_THROW(Store(kHere, server.port(), kSecret, 0.1), CommunicationError);
}

TEST(StoreServerTest, AnAddressThatCannotBeHad) {
  const StoreServer server(kHere, 0, kSecret);
  const std::string taken = message_of<IoError>([&] { StoreServer(kHere, server.port(), kSecret); });
  EXPECT_TRUE(contains(
      taken, "cannot listen on 127.0.0.1 port " + std::to_string(server.port()) + ": Address already in use"))
      << taken;
  EXPECT_TRUE(contains(message_of<IoError>([&] { StoreServer("192.0.2.1", 0, kSecret); }), "192.0.2.1"));
  EXPECT_THROW(StoreServer("", 0, kSecret), InvalidArgument);
  EXPECT_THROW(StoreServer(kHere, 0, ""), InvalidArgument);
  EXPECT_THROW(Store(kHere, server.port(), "", 1), InvalidArgument);
}

}  // namespace
}  // namespace tessera
