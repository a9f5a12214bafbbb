/// The emulator itself: what the threads of a block do together, and what it says of kernels with mistakes.

#include <gtest/gtest.h>

#if !__has_include("emulator.hpp")  // only an emulated build has its folder in the include path

TEST(CudaEmulator, IsPartOfThisBuild) {
  GTEST_SKIP() << "the CUDA backend is not emulated in this build (TESSERA_CUDA=emulated)";
}

#else

#include <algorithm>
#include <atomic>
#include <thread>

#include "emulator_support.hpp"

namespace tessera::test {
namespace {

using kernels::cuda::launch;
using tessera_emulator::for_each_order;

TEST(CudaEmulator, Shuffles) {
  for_each_order([] {
    const DeviceStream stream;
    DeviceBuffer<double> out(stream, zeros<double>(32 * 6));
    launch(shuffle_kernel, 1, 32, 0, stream.launch(), out.data());
    const auto host = out.host();
    for (int lane = 0; lane < 32; ++lane) {
      const double expected[6] = {70,
                                  static_cast<double>(lane ^ 5),
                                  static_cast<double>(lane < 28 ? lane + 4 : lane),
                                  static_cast<double>(lane >= 3 ? lane - 3 : lane),
                                  (lane ^ 1) + 0.5,
                                  static_cast<double>(lane % 8 < 5 ? lane + 3 : lane)};
      for (int i = 0; i < 6; ++i)
        EXPECT_EQ(host[static_cast<std::size_t>(lane * 6 + i)], expected[i]) << lane << " " << i;
    }
  });
}

TEST(CudaEmulator, Votes) {
  for_each_order([] {
    const DeviceStream stream;
    DeviceBuffer<unsigned> out(stream, zeros<unsigned>(64 * 6));
    launch(vote_kernel, 1, 64, 0, stream.launch(), out.data());
    const auto host = out.host();
    for (unsigned thread = 0; thread < 64; ++thread) {
      const unsigned second = thread / 32;  // warp of thread 40
      const unsigned expected[6] = {0xaaaaaaaau, second, 1 - second, 32, 1, 0};
      for (unsigned i = 0; i < 6; ++i) EXPECT_EQ(host[thread * 6 + i], expected[i]) << thread << " " << i;
    }
  });
}

TEST(CudaEmulator, LanesThatEndedAreNotWaitedFor) {
  for_each_order([] {
    const DeviceStream stream;
    DeviceBuffer<int> out(stream, zeros<int>(1));
    launch(early_exit_kernel, 1, 32, 0, stream.launch(), out.data());
    EXPECT_EQ(out.host()[0], 20);
  });
}

TEST(CudaEmulator, BlockSumsInEveryOrder) {
  for (const dim3 block : {dim3(32), dim3(96), dim3(64, 4), dim3(1024)}) {
    const std::size_t threads = block.x * block.y, blocks = 3;
    std::vector<float> values(threads * blocks);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 7) % 31) - 12;
    for_each_order([&] {
      const DeviceStream stream;
      DeviceBuffer<float> in(stream, values), sums(stream, zeros<float>(blocks)),
          largest(stream, zeros<float>(blocks));
      DeviceBuffer<double> precise(stream, zeros<double>(blocks));
      launch(block_sums_kernel, 3, block, 0, stream.launch(), in.data(), sums.data(), precise.data(),
             largest.data());
      for (std::size_t b = 0; b < blocks; ++b) {
        double sum = 0;
        float most = -1e9f;
        for (std::size_t i = 0; i < threads; ++i) {
          sum += values[b * threads + i];
          most = std::max(most, values[b * threads + i]);
        }
        EXPECT_EQ(sums.host()[b], 3 * sum);  // whole numbers: exact in any order
        EXPECT_EQ(precise.host()[b], sum);
        EXPECT_EQ(largest.host()[b], most);
      }
    });
  }
}

TEST(CudaEmulator, MissingBarrierShows) {
  std::vector<int> values(128), reversed(128);
  for (int i = 0; i < 128; ++i)
    values[static_cast<std::size_t>(i)] = reversed[static_cast<std::size_t>(127 - i)] = i;
  int right = 0, orders = 0;
  for_each_order([&] {
    const DeviceStream stream;
    DeviceBuffer<int> in(stream, values), out(stream, zeros<int>(128));
    launch(reverse_kernel<true>, 1, 128, 128 * sizeof(int), stream.launch(), in.data(), out.data());
    EXPECT_EQ(out.host(), reversed);
    launch(reverse_kernel<false>, 1, 128, 128 * sizeof(int), stream.launch(), in.data(), out.data());
    ++orders;
    right += out.host() == reversed;
  });
  EXPECT_EQ(orders, 5);
  EXPECT_LT(right, orders);
}

TEST(CudaEmulator, DynamicSharedMemory) {
  const DeviceStream stream;
  DeviceBuffer<int> fresh(stream, zeros<int>(3));
  const int most = 227 * 1024 / 4;
  launch(fresh_shared_kernel, 3, 32, most * sizeof(float), stream.launch(), most, fresh.data());
  EXPECT_EQ(fresh.host(), std::vector<int>(3, 1));
  EXPECT_THROW(
      launch(fresh_shared_kernel, 3, 32, (most + 1) * sizeof(float), stream.launch(), most, fresh.data()),
      DeviceError);
  launch(shared_overrun_kernel, 1, 2, 64 * sizeof(float), stream.launch(), 64);
  expect_contains(failure(stream), "beyond the dynamic shared memory");
}

TEST(CudaEmulator, Atomics) {
  const DeviceStream stream;
  DeviceBuffer<unsigned> total(stream, zeros<unsigned>(1));
  DeviceBuffer<float> sum(stream, zeros<float>(1));
  DeviceBuffer<int> largest(stream, zeros<int>(1));
  launch(count_kernel, 7, 100, 0, stream.launch(), total.data(), sum.data(), largest.data());
  EXPECT_EQ(total.host()[0], 700u);
  EXPECT_EQ(sum.host()[0], 350.0f);
  EXPECT_EQ(largest.host()[0], 699);
}

TEST(CudaEmulator, DivergenceIsAnError) {
  for_each_order([] {
    const DeviceStream blocks, warps, mixed;
    DeviceBuffer<int> out(warps, zeros<int>(32));
    launch(divergent_block_kernel, 2, 64, 0, blocks.launch());
    expect_contains(failure(blocks), "divergent_block_kernel");
    expect_contains(failure(blocks), "waits at __syncthreads, but thread (40,0,0)");
    launch(divergent_warp_kernel, 1, 32, 0, warps.launch(), out.data());
    expect_contains(failure(warps), "different operations");
    launch(mixed_wait_kernel, 1, 32, 0, mixed.launch());
    expect_contains(failure(mixed), "never reach");
  });
}

TEST(CudaEmulator, AFailedKernelStopsItsStreamOnly) {
  const DeviceStream failing, healthy;
  DeviceBuffer<float> values(healthy, zeros<float>(8));
  launch(trap_kernel, 3, 64, 0, failing.launch());
  expect_contains(failure(failing), "trap_kernel");
  expect_contains(failure(failing), "__trap was called");
  expect_contains(tessera_emulator::last_failure(), "trap_kernel");
  EXPECT_THROW(launch(add_one_kernel, 1, 8, 0, failing.launch(), values.data(), 8), DeviceError);
  launch(add_one_kernel, 1, 8, 0, healthy.launch(), values.data(), 8);
  EXPECT_EQ(values.host(), std::vector<float>(8, 1.0f));
}

TEST(CudaEmulator, AFailureTravelsAlongEvents) {
  const DeviceStream failing, waiting;
  void* const event = cuda::create_event();
  std::atomic<bool> go = false;
  tessera_emulator::enqueue(static_cast<cudaStream_t>(failing.get()), "hold", [&] {
    while (!go) std::this_thread::yield();
  });
  launch(trap_kernel, 3, 64, 0, failing.launch());
  cuda::record(event, failing.get());
  cuda::wait(waiting.get(), event);
  go = true;
  expect_contains(failure(waiting), "trap_kernel");
  EXPECT_THROW(cuda::synchronize_event(event), DeviceError);
  cuda::destroy_event(event);
}
}  // namespace
}  // namespace tessera::test

#endif
