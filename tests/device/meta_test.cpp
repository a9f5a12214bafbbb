/// The meta device: everything is counted, nothing is there.

#include <gtest/gtest.h>

#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera {
namespace {

TEST(Meta, IsADeviceOfItsOwn) {
  const ExecCtx ctx = ExecCtx::meta(5);
  EXPECT_TRUE(ctx.device().is_meta());
  EXPECT_FALSE(ctx.device().is_cpu() || ctx.device().is_cuda());
  EXPECT_EQ(ctx.seed, 5u);
  std::ostringstream out;
  out << ctx.device();
  EXPECT_EQ(out.str(), "meta");
}

TEST(Meta, RunsNothing) {
  const ExecCtx ctx = ExecCtx::meta();
  ctx.stream->launch([] { FAIL() << "work ran"; });
  void* const a = ctx.allocator->allocate(1024);
  void* const b = ctx.allocator->allocate(1024);
  const std::vector<char> host(1024);
  ctx.allocator->copy_from_host(a, host.data(), host.size());
  ctx.stream->copy(b, a, 1024);
  Event event;
  ctx.stream->record(event);
  ctx.stream->wait(event);
  ctx.stream->synchronize();
  EXPECT_TRUE(event.done());
  std::vector<char> back(1024);
  EXPECT_THROW(ctx.allocator->copy_to_host(back.data(), a, back.size()), InvalidArgument);
  ctx.allocator->release(a);
  ctx.allocator->release(b);
}

TEST(Meta, AllocatorCountsAsTheRealOne) {
  CachingAllocator real;
  const ExecCtx ctx = ExecCtx::meta();
  std::mt19937 random(7);
  std::vector<std::pair<void*, void*>> held;
  for (int i = 0; i < 400; ++i) {
    if (held.size() > 12 || (!held.empty() && random() % 3 == 0)) {
      const std::size_t at = random() % held.size();
      real.release(held[at].first);
      ctx.allocator->release(held[at].second);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
    } else {
      const std::size_t bytes = (std::size_t{1} << random() % 19) + random() % 1000;
      held.emplace_back(real.allocate(bytes), ctx.allocator->allocate(bytes));
    }
    const AllocatorStats a = real.stats(), b = ctx.allocator->stats();
    ASSERT_EQ(a.used_bytes, b.used_bytes) << i;
    ASSERT_EQ(a.peak_used_bytes, b.peak_used_bytes) << i;
  }
  for (const auto& [a, b] : held) {
    real.release(a);
    ctx.allocator->release(b);
  }
}

TEST(Meta, HasMoreMemoryThanAnyMachine) {
  const ExecCtx ctx = ExecCtx::meta();
  void* const memory = ctx.allocator->allocate(std::size_t{1} << 50);
  EXPECT_EQ(ctx.allocator->stats().peak_used_bytes, std::size_t{1} << 50);
  ctx.allocator->release(memory);
}

}  // namespace
}  // namespace tessera
