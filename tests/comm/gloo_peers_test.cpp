/// How ranks connect to each other while strangers do what they can.

#include "comm/gloo_peers.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "tessera/base/error.hpp"
#include "tests/comm/conformance.hpp"
#include "tests/comm/gloo_support.hpp"
#include "tests/comm/stranger.hpp"
#include "tests/support/errors.hpp"

namespace tessera::test {
namespace {

constexpr const char* kHere = "127.0.0.1";

PeersOptions options_of(int rank, int size) {
  return {.rank = rank,
          .size = size,
          .address = kHere,
          .job = "j",
          .key = "key",
          .name = "test",
          .timeout_s = 30};
}

/// Ranks that listen; `connect` lets all of them connect, each in a thread.
class Ranks {
 public:
  explicit Ranks(int size, double proof_timeout_s = 5) {
    for (int rank = 0; rank < size; ++rank) {
      PeersOptions options = options_of(rank, size);
      options.proof_timeout_s = proof_timeout_s;
      peers_.push_back(std::make_unique<Peers>(std::move(options)));
      places_.emplace_back(kHere, peers_.back()->port());
    }
  }
  std::uint16_t port(int rank) const { return places_[static_cast<std::size_t>(rank)].second; }
  /// Each tells each other its number over the new connections, which must be all right.
  void connect() {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank)
      threads.emplace_back([this, rank] { run(rank); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void run(std::size_t rank) {
    const auto sockets = peers_[rank]->connect({places_.begin(), places_.begin() + static_cast<long>(rank)});
    ASSERT_EQ(sockets.size(), peers_.size());
    const char own = static_cast<char>('a' + rank);
    for (const store::Socket& socket : sockets) {
      if (socket) {
        EXPECT_EQ(::send(socket.get(), &own, 1, MSG_NOSIGNAL), 1);
      }
    }
    for (std::size_t other = 0; other < sockets.size(); ++other) {
      EXPECT_EQ(bool(sockets[other]), other != rank);
      if (!sockets[other]) continue;
      char theirs = 0;
      pollfd wait{sockets[other].get(), POLLIN, 0};
      EXPECT_EQ(::poll(&wait, 1, 20000), 1);
      EXPECT_EQ(::recv(sockets[other].get(), &theirs, 1, 0), 1);
      EXPECT_EQ(theirs, static_cast<char>('a' + other));
    }
  }

  std::vector<std::unique_ptr<Peers>> peers_;
  std::vector<std::pair<std::string, std::uint16_t>> places_;
};

TEST(GlooPeers, EachConnectsToEach) { Ranks(5).connect(); }

/// They were there first, and stay.
TEST(GlooPeers, SilentStrangersHoldUpNobody) {
  Ranks ranks(3, 30);
  std::vector<Stranger> silent;
  for (int i = 0; i < 300; ++i) silent.emplace_back(ranks.port(i % 3));
  const auto begin = std::chrono::steady_clock::now();
  ranks.connect();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

/// The words of a caller that claims to be `rank`, with what it takes for a proof.
std::string words_of(std::uint32_t rank, const store::Digest& nonce, const store::Digest& proof) {
  std::string words;
  for (int shift = 0; shift < 32; shift += 8) words.push_back(static_cast<char>((rank >> shift) & 0xff));
  return words.append(nonce.begin(), nonce.end()).append(proof.begin(), proof.end());
}

TEST(GlooPeers, WhatStrangersSayChangesNothing) {
  Ranks ranks(3);
  std::atomic<bool> stop{false};
  const auto attack = [&](int seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    while (!stop) {
      store::Digest nonce{};
      std::string reason;
      const store::Socket socket = store::connect_to(kHere, ranks.port(seed % 3), store::after(1), reason);
      if (!socket) return;  // all have come, and nobody listens any more
      std::string bytes(random() % 200, '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      const store::Digest wrong = store::proof_of("another key", "proof", nonce, nonce);
      if (random() % 2 == 0) bytes = words_of(random() % 4, nonce, wrong);
      if (random() % 4 == 0) bytes.resize(bytes.size() / 2);
      ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
  };
  std::vector<std::thread> strangers;
  for (int seed = 0; seed < 3; ++seed) strangers.emplace_back(attack, seed);
  ranks.connect();
  stop = true;
  for (std::thread& stranger : strangers) stranger.join();
}

/// A right proof serves for its ranks, its direction and its job only, and once.
TEST(GlooPeers, AProofIsForOneCall) {
  PeersOptions options = options_of(0, 2);
  options.timeout_s = 3;
  Peers zero(options);
  const std::uint16_t port = zero.port();
  std::string message;
  std::thread rank0([&] { message = message_of<CommunicationError>([&] { zero.connect({}); }); });
  std::string spoken;  // of the last call
  const auto answer_to = [&](const std::string& what, std::uint32_t rank) {
    const Stranger caller(port);
    const std::string greeting = caller.hear(store::kGreetingBytes);
    store::Digest theirs{}, own{};
    std::copy_n(greeting.begin() + store::kMagic.size(), theirs.size(), theirs.begin());
    spoken = words_of(rank, own, store::proof_of("key", what, theirs, own));
    caller.say(spoken);
    return caller.hear();
  };
  EXPECT_EQ(answer_to("proof of rank 1's call to rank 0 in job other", 1), "");
  EXPECT_EQ(answer_to("answer of rank 1's call to rank 0 in job j", 1), "");
  EXPECT_EQ(answer_to("proof of rank 0's call to rank 1 in job j", 1), "");
  EXPECT_EQ(answer_to("proof of rank 2's call to rank 0 in job j", 2), "");
  EXPECT_EQ(answer_to("proof of rank 0's call to rank 0 in job j", 0), "");
  EXPECT_EQ(answer_to("client", 1), "");
  rank0.join();
  EXPECT_TRUE(contains(message,
                       "rank 0 of 2 (test) could not connect to the others within 3 s: rank 1 has not "
                       "called"))
      << message;

  Peers again(options_of(0, 2));
  std::thread rank0_again([&] { EXPECT_EQ(again.connect({}).size(), 2u); });
  {
    const Stranger replayed(again.port());  // words that were right once, to another nonce
    replayed.hear(store::kGreetingBytes);
    replayed.say(spoken);
    EXPECT_EQ(replayed.hear(), "");
  }
  Peers one(options_of(1, 2));
  one.connect({{kHere, again.port()}});
  rank0_again.join();
}

TEST(GlooPeers, WhoDoesNotAnswerIsNamed) {
  const store::Socket dead =
      store::listen_on(kHere, 0);  // takes calls and says nothing, as a stopped process
  PeersOptions options = options_of(2, 4);
  options.timeout_s = 0.4;
  Peers two(options);
  std::uint16_t nobody = 0;
  { nobody = store::port_of(store::listen_on(kHere, 0)); }
  const std::string message = message_of<CommunicationError>([&] {
    two.connect({{kHere, store::port_of(dead)}, {kHere, nobody}});
  });
  EXPECT_TRUE(
      contains(message, detail::concat("rank 0 at 127.0.0.1 port ", store::port_of(dead), ": no answer")))
      << message;
  EXPECT_TRUE(contains(message, detail::concat("rank 1 at 127.0.0.1 port ", nobody, ": Connection refused")))
      << message;
  EXPECT_TRUE(contains(message, "rank 3 has not called")) << message;
}

/// An impostor at a rank's address learns nothing that it could use, and is not believed.
TEST(GlooPeers, TheCalledRankProvesItselfToo) {
  PeersOptions options = options_of(1, 2);
  options.timeout_s = 1;
  Peers one(options);
  const store::Socket impostor = store::listen_on(kHere, 0);
  std::atomic<bool> stop{false};
  std::thread works([&] {
    while (!stop) {
      const store::Socket socket(::accept4(impostor.get(), nullptr, nullptr, 0));
      if (!socket) {
        ::usleep(2000);
        continue;
      }
      const std::string greeting = std::string(store::kMagic) + std::string(32, 'n');
      ::send(socket.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
      std::array<char, 68> words{};
      ::recv(socket.get(), words.data(), words.size(), MSG_WAITALL);
      ::send(socket.get(), words.data() + 36, 32, MSG_NOSIGNAL);  // their own proof
    }
  });
  const std::string message = message_of<CommunicationError>([&] {
    one.connect({{kHere, store::port_of(impostor)}});
  });
  stop = true;
  works.join();
  EXPECT_TRUE(contains(message, "what answers there is not this job's")) << message;
}

/// How many sockets of this process listen.
int listening_sockets() {
  int count = 0;
  for (int descriptor = 0; descriptor < 4096; ++descriptor) {
    int listening = 0;
    socklen_t length = sizeof listening;
    if (::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) == 0 && listening != 0)
      ++count;
  }
  return count;
}

TEST(GlooPeers, NobodyListensOnceAllAreConnected) {
  const int before = listening_sockets();
  std::atomic<int> most{0};
  run_gloo(3, {.timeout_s = 30}, [&](const std::shared_ptr<Communicator>& comm) {
    const ExecCtx ctx = ExecCtx::cpu(1, 1);
    comm->barrier(ctx);
    most = std::max(most.load(), listening_sockets());
    comm->barrier(ctx);
  });
  EXPECT_EQ(most, before + 1);  // the store
}

}  // namespace
}  // namespace tessera::test
