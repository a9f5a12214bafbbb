#include "tessera/device/allocator.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// Memory that is given back at the end of a test.
struct Held {
  Held(CachingAllocator& from, std::size_t bytes) : allocator(&from), data(from.allocate(bytes)) {}
  Held(Held&& other) noexcept : allocator(other.allocator), data(std::exchange(other.data, nullptr)) {}
  Held& operator=(Held&&) = delete;
  ~Held() { release(); }
  void release() {
    if (data != nullptr) allocator->release(std::exchange(data, nullptr));
  }

  CachingAllocator* allocator;
  void* data;
};

TEST(Allocator, PointersAreAlignedAndNeverNull) {
  CachingAllocator allocator;
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{257}, 3 * kMiB + 1}) {
    const Held p(allocator, bytes);
    ASSERT_NE(p.data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p.data) % 64, 0u) << bytes;
    std::memset(p.data, 0x5a, bytes);
  }
}

TEST(Allocator, HandsOutReleasedMemoryAgain) {
  CachingAllocator allocator;
  for (const std::size_t bytes : {std::size_t{1000}, 5 * kMiB, 100 * kMiB}) {
    void* first = allocator.allocate(bytes);
    allocator.release(first);
    const auto before = allocator.stats();
    EXPECT_EQ(allocator.allocate(bytes), first) << bytes;
    EXPECT_EQ(allocator.stats().system_allocations, before.system_allocations);
    allocator.release(first);
  }
}

TEST(Allocator, SmallRequestsShareASegment) {
  CachingAllocator allocator;
  std::vector<Held> held;
  for (int i = 0; i < 1000; ++i) held.emplace_back(allocator, 1024);
  EXPECT_EQ(allocator.stats().system_allocations, 1u);
  EXPECT_EQ(allocator.stats().used_bytes, 1000u * 1024);
}

TEST(Allocator, LiveBlocksDoNotOverlap) {
  CachingAllocator allocator;
  struct Piece {
    unsigned char* data;
    std::size_t bytes;
    unsigned char mark;
  };
  std::vector<Piece> live;
  std::mt19937 random(1);
  const auto check_and_release = [&](std::size_t i) {
    for (std::size_t k = 0; k < live[i].bytes; k += 61) ASSERT_EQ(live[i].data[k], live[i].mark);
    if (live[i].bytes > 0) {
      ASSERT_EQ(live[i].data[live[i].bytes - 1], live[i].mark);
    }
    allocator.release(live[i].data);
    live[i] = live.back();
    live.pop_back();
  };
  for (int round = 0; round < 3000; ++round) {
    if (live.size() < 40 && random() % 3 != 0) {
      const std::size_t bytes = random() % 20 == 0 ? random() % (3 * kMiB) : random() % 5000;
      const auto mark = static_cast<unsigned char>(random());
      live.push_back({static_cast<unsigned char*>(allocator.allocate(bytes)), bytes, mark});
      std::memset(live.back().data, mark, bytes);
    } else if (!live.empty()) {
      check_and_release(random() % live.size());
    }
  }
  while (!live.empty()) check_and_release(0);
  EXPECT_EQ(allocator.stats().used_bytes, 0u);
}

TEST(Allocator, NeighboursJoinAgain) {
  CachingAllocator allocator;
  std::vector<void*> pieces;
  for (int i = 0; i < 16; ++i) pieces.push_back(allocator.allocate(2 * kMiB));  // one segment of 32 MiB
  ASSERT_EQ(allocator.stats().system_allocations, 1u);
  for (const int i : {1, 3, 2, 0, 15, 14, 4, 5, 13, 6, 12, 7, 11, 8, 10, 9}) {
    allocator.release(pieces[static_cast<std::size_t>(i)]);
  }
  const Held whole(allocator, 32 * kMiB);
  EXPECT_EQ(allocator.stats().system_allocations, 1u);
  EXPECT_EQ(whole.data, pieces[0]);
}

TEST(Allocator, SplitsWhatItReuses) {
  CachingAllocator allocator;
  allocator.release(allocator.allocate(30 * kMiB));
  const Held a(allocator, 10 * kMiB), b(allocator, 10 * kMiB);
  EXPECT_NE(a.data, b.data);
  EXPECT_EQ(allocator.stats().system_allocations, 1u);
  EXPECT_EQ(allocator.stats().used_bytes, 20 * kMiB);
}

TEST(Allocator, CountsUseAndPeak) {
  CachingAllocator allocator;
  EXPECT_EQ(allocator.stats().system_bytes, 0u);
  void* a = allocator.allocate(1024);
  void* b = allocator.allocate(2048);
  EXPECT_EQ(allocator.stats().used_bytes, 3072u);
  allocator.release(b);
  EXPECT_EQ(allocator.stats().used_bytes, 1024u);
  EXPECT_EQ(allocator.stats().peak_used_bytes, 3072u);
  allocator.reset_peak();
  EXPECT_EQ(allocator.stats().peak_used_bytes, 1024u);
  allocator.release(a);
  EXPECT_EQ(allocator.stats().peak_used_bytes, 1024u);
}

TEST(Allocator, KnowsWhetherWorkMayRunAgainInItsMemory) {
  CachingAllocator allocator;
  const Held lasting(allocator, 4096);
  const std::uint64_t before = allocator.stats().allocations;
  const auto use = allocator.begin_use(before);
  EXPECT_FALSE(allocator.may_use(*use));  // it is open
  allocator.release(allocator.allocate(64 << 10));
  Held kept(allocator, 1024);
  allocator.release(allocator.allocate(64 << 10));
  allocator.end_use(*use);
  EXPECT_TRUE(allocator.may_use(*use));
  {
    const Held other(allocator, 300);  // in memory that was used
    EXPECT_FALSE(allocator.may_use(*use));
  }
  EXPECT_TRUE(allocator.may_use(*use));
  {
    const Held far(allocator, 40 * kMiB);  // in a segment of its own
    EXPECT_TRUE(allocator.may_use(*use));
  }
  kept.release();
  EXPECT_TRUE(allocator.may_use(*use));
  const Held in_its_place(allocator, 1024);
  EXPECT_FALSE(allocator.may_use(*use));  // though it has the same address and size
}

TEST(Allocator, MissesWhatWorkReads) {
  CachingAllocator allocator;
  Held lasting(allocator, 4096);
  const std::uint64_t before = allocator.stats().allocations;
  Held later(allocator, 4096);
  const auto use = allocator.begin_use(before);
  Held kept(allocator, 4096);
  allocator.end_use(*use);
  later.release();  // which came too late to last
  EXPECT_TRUE(allocator.may_use(*use));
  const auto other = allocator.begin_use(allocator.stats().allocations);
  allocator.end_use(*other);
  kept.release();  // of a recording, which no other one reads
  EXPECT_TRUE(allocator.may_use(*other));
  lasting.release();
  EXPECT_FALSE(allocator.may_use(*use));
  EXPECT_FALSE(allocator.may_use(*other));
}

TEST(Allocator, MemoryThatWentBackIsUsedNoMore) {
  CachingAllocator allocator;
  const auto use = allocator.begin_use(0);
  allocator.release(allocator.allocate(40 * kMiB));
  allocator.end_use(*use);
  EXPECT_TRUE(allocator.may_use(*use));
  allocator.trim();
  EXPECT_FALSE(allocator.may_use(*use));
}

TEST(Allocator, TrimReturnsWhollyFreeSegments) {
  CachingAllocator allocator;
  void* small = allocator.allocate(100);
  allocator.release(allocator.allocate(64 * kMiB));
  EXPECT_GE(allocator.stats().system_bytes, 64 * kMiB);
  allocator.trim();
  EXPECT_GT(allocator.stats().system_bytes, 0u);  // the small one is in use
  EXPECT_LT(allocator.stats().system_bytes, 64 * kMiB);
  std::memset(small, 1, 100);
  allocator.release(small);
  allocator.trim();
  EXPECT_EQ(allocator.stats().system_bytes, 0u);
}

TEST(Allocator, AStepLikeTheOneBeforeAsksTheSystemForNothing) {
  CachingAllocator allocator;
  const auto step = [&] {
    std::mt19937 random(3);
    std::vector<void*> live;
    for (int i = 0; i < 400; ++i) {
      live.push_back(allocator.allocate(random() % 8 == 0 ? random() % (6 * kMiB) : random() % 100000));
      if (random() % 2 == 0) {
        allocator.release(live.front());
        live.erase(live.begin());
      }
    }
    for (void* p : live) allocator.release(p);
  };
  step();
  const auto after_one = allocator.stats();
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(allocator.stats().system_allocations, after_one.system_allocations);
  EXPECT_EQ(allocator.stats().system_bytes, after_one.system_bytes);
  EXPECT_EQ(allocator.stats().used_bytes, 0u);
}

TEST(Allocator, ServesSeveralThreads) {
  CachingAllocator allocator;
  std::vector<std::thread> threads;
  std::vector<int> damaged(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 2000; ++i) {
        const std::size_t bytes = 1 + random() % 4000;
        auto* p = static_cast<unsigned char*>(allocator.allocate(bytes));
        std::memset(p, t + 1, bytes);
        std::this_thread::yield();
        for (std::size_t k = 0; k < bytes; k += 97) damaged[static_cast<std::size_t>(t)] += p[k] != t + 1;
        allocator.release(p);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(damaged, std::vector<int>(4, 0));
  EXPECT_EQ(allocator.stats().used_bytes, 0u);
}

TEST(Allocator, SaysHowMuchTheSystemRefused) {
  CachingAllocator allocator;
  void* p = allocator.allocate(100);
  try {
    allocator.allocate(std::size_t{1} << 50);
    FAIL() << "a petabyte was granted";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("1125899906842624"), std::string::npos) << error.what();
  }
  EXPECT_THROW(allocator.allocate(std::numeric_limits<std::size_t>::max()), IoError);
  allocator.release(p);  // the refusals left everything usable
  EXPECT_EQ(Held(allocator, 100).data, p);
}

TEST(Allocator, RefusesMemoryItDidNotHandOut) {
  CachingAllocator allocator;
  int other = 0;
  EXPECT_THROW(allocator.release(&other), InternalError);
  void* p = allocator.allocate(10);
  allocator.release(p);
  EXPECT_THROW(allocator.release(p), InternalError);
}

}  // namespace
}  // namespace tessera
