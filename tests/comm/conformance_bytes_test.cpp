/// Bytes between ranks, on every kind of communicator.

#include "tessera/comm/bytes.hpp"
#include "tests/comm/conformance.hpp"

namespace tessera::test {
namespace {

/// Any bytes, zeros among them, that tell rank and place apart.
std::string bytes_of(int rank, std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(i * 31 + i / 251 + 7u * rank);
  return bytes;
}

constexpr std::size_t kLarge = (std::size_t{1} << 20) + 5;

TEST_P(Conformance, BytesOfAllRanks) {
  on_each_size(1, 5, [](const auto& comm) {
    // All empty; the first one empty, others ever longer; only the last rank's are long.
    const auto last = static_cast<std::size_t>(comm->size() - 1);
    for (const auto length : {+[](std::size_t, std::size_t) { return std::size_t{0}; },
                              +[](std::size_t rank, std::size_t) { return rank * rank * 1000; },
                              +[](std::size_t rank, std::size_t end) { return rank == end ? kLarge : 1; }}) {
      std::vector<std::string> expected;
      for (std::size_t r = 0; r <= last; ++r)
        expected.push_back(bytes_of(static_cast<int>(r), length(r, last)));
      EXPECT_EQ(all_gather_bytes(*comm, expected[static_cast<std::size_t>(comm->rank())]), expected);
    }
  });
}

TEST_P(Conformance, BytesOfOneRank) {
  on_each_size(1, 5, [](const auto& comm) {
    for (int root = 0; root < comm->size(); ++root) {
      for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{4099}, kLarge}) {
        const std::string bytes = bytes_of(root, length);
        // What others give makes no difference.
        const std::string own = comm->rank() == root ? bytes : bytes_of(9, 3u * comm->rank());
        EXPECT_EQ(broadcast_bytes(*comm, own, root), bytes);
      }
    }
  });
}

TEST_P(Conformance, BytesOfNoRankAreRefused) {
  on_each_size(1, 2, [](const auto& comm) {
    EXPECT_THROW(broadcast_bytes(*comm, "x", comm->size()), InvalidArgument);
    EXPECT_THROW(broadcast_bytes(*comm, "x", -1), InvalidArgument);
    EXPECT_EQ(broadcast_bytes(*comm, "x"), "x");
  });
}

TEST_P(ConformanceFaults, BytesNameWhoAskedForThem) {
  GetParam().run(2, {.timeout_s = 60, .check = true}, [](const auto& comm) {
    const std::string message = message_of<CommunicationError>([&] {
      if (comm->rank() == 0) {
        all_gather_bytes(*comm, "abc");
      } else {
        broadcast_bytes(*comm, "abc");
      }
    });
    for (const char* part : {"all_gather of int64", "broadcast of", "conformance_bytes_test.cpp:"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_EQ(message.find("src/comm/bytes.cpp"), std::string::npos) << message;
  });
}

}  // namespace
}  // namespace tessera::test
