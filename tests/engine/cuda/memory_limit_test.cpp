/// The memory of GPUs, by which training.recompute auto is settled.

#include <gtest/gtest.h>

#include "tessera/engine/plan.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

TEST(CudaMemoryLimit, IsTheSmallestGpusLessAReserve) {
  if (cuda_devices().count == 0) GTEST_SKIP() << "needs a CUDA device";
  const std::int64_t total = memory_bytes_of({DeviceType::cuda, 0});
  DeviceConfig device{.type = DeviceChoice::cuda};
  const MemoryLimit limit = memory_limit(device, 1);
  EXPECT_LT(limit.bytes, total);
  EXPECT_GE(limit.bytes, total - total / 4);
  EXPECT_EQ(limit.source.rfind("a GPU's ", 0), 0u) << limit.source;
  EXPECT_LE(memory_limit(device, 64).bytes, limit.bytes);  // a GPU belongs to one rank
  EXPECT_GE(4 * memory_limit(device, 64).bytes, limit.bytes);
  device.memory_gb = 2;
  EXPECT_EQ(memory_limit(device, 1).bytes, 2'000'000'000);
}

}  // namespace
}  // namespace tessera
