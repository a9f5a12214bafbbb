/// The emulator itself: streams, events, copies and memory.

#if __has_include("emulator.hpp")  // only an emulated build has its folder in the include path

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "emulator_support.hpp"

namespace tessera::test {
namespace {

using kernels::cuda::launch;

TEST(CudaEmulatorMemory, StreamsAreAsynchronousAndInOrder) {
  const DeviceStream first, second;
  DeviceBuffer<float> values(first, zeros<float>(64));
  std::atomic<bool> go = false;
  tessera_emulator::enqueue(static_cast<cudaStream_t>(first.get()), "hold", [&] {
    while (!go) std::this_thread::yield();
  });
  void* const begin = cuda::create_event();
  void* const middle = cuda::create_event();
  EXPECT_TRUE(cuda::done(middle)) << "never recorded";
  cuda::record(begin, second.get());
  cuda::synchronize_event(begin);
  for (int i = 0; i < 5; ++i) launch(add_one_kernel, 1, 64, 0, first.launch(), values.data(), 64);
  cuda::record(middle, first.get());
  cuda::wait(second.get(), middle);
  for (int i = 0; i < 5; ++i) launch(add_one_kernel, 1, 64, 0, second.launch(), values.data(), 64);
  EXPECT_FALSE(cuda::done(middle));
  go = true;
  second.synchronize();
  EXPECT_TRUE(cuda::done(middle));
  EXPECT_GE(cuda::seconds_between(begin, middle), 0.0);
  EXPECT_EQ(values.host(), std::vector<float>(64, 10.0f));
  cuda::destroy_event(begin);
  cuda::destroy_event(middle);
}

TEST(CudaEmulatorMemory, CopiesAreInTheStreamsOrder) {
  const DeviceStream stream;
  constexpr std::size_t kBytes = 64 * sizeof(float);
  auto* const device = static_cast<float*>(cuda::allocate(0, kBytes));
  auto* const pinned = static_cast<float*>(cuda::allocate_pinned(kBytes));
  std::vector<float> pageable(64, 1.0f), result(64);
  std::fill_n(pinned, 64, 1.0f);
  std::atomic<bool> go = false;
  const auto hold = [&] {
    go = false;
    tessera_emulator::enqueue(static_cast<cudaStream_t>(stream.get()), "hold", [&] {
      while (!go) std::this_thread::yield();
    });
  };
  hold();
  cuda::copy(device, pageable.data(), kBytes, stream.get());
  std::fill(pageable.begin(), pageable.end(), 5.0f);  // the call has its own copy
  go = true;
  cuda::copy(result.data(), device, kBytes, stream.get());  // waits
  EXPECT_EQ(result, std::vector<float>(64, 1.0f));

  hold();
  cuda::copy(device, pinned, kBytes, stream.get());
  std::fill_n(pinned, 64, 7.0f);  // read only when the copy's turn comes
  go = true;
  cuda::copy(result.data(), device, kBytes, stream.get());
  EXPECT_EQ(result, std::vector<float>(64, 7.0f));
  cuda::deallocate(device);
  cuda::deallocate_pinned(pinned);
}

TEST(CudaEmulatorMemory, ACopyOutsideOfAnAllocationFails) {
  const DeviceStream stream;
  auto* const memory = static_cast<char*>(cuda::allocate(0, 100));
  std::vector<char> host(200);
  cuda::copy(memory, host.data(), 101, stream.get());
  expect_contains(failure(stream), "not all in one allocation");
  cuda::deallocate(memory);
}

template <typename T>
class CudaEmulatorVectors : public ::testing::Test {};
using Types = ::testing::Types<float, bfloat16, float16>;
TYPED_TEST_SUITE(CudaEmulatorVectors, Types);

TYPED_TEST(CudaEmulatorVectors, CopyOrFault) {
  using T = TypeParam;
  constexpr std::size_t kCount = kernels::cuda::kPack<T>;
  std::vector<T> values;
  for (std::size_t i = 0; i < kCount; ++i) values.push_back(T(static_cast<float>(i) + 0.25f));
  {
    const DeviceStream stream;
    DeviceBuffer<T> in(stream, values), out(stream, zeros<T>(kCount));
    launch(vector_copy_kernel<T>, 1, 1, 0, stream.launch(), in.data(), out.data());
    const auto host = out.host();
    for (std::size_t i = 0; i < kCount; ++i)
      EXPECT_EQ(static_cast<float>(host[i]), static_cast<float>(values[i]));
  }
  {
    const DeviceStream stream;
    DeviceBuffer<T> in(stream, values, 1), out(stream, zeros<T>(kCount));
    launch(vector_copy_kernel<T>, 1, 1, 0, stream.launch(), in.data(), out.data());
    expect_contains(failure(stream), "not a multiple");
  }
  {
    const DeviceStream stream;
    DeviceBuffer<T> in(stream, values), out(stream, zeros<T>(kCount));
    launch(vector_copy_kernel<T>, 1, 1, 0, stream.launch(), in.data() + kCount,
           out.data());  // one element is left
    expect_contains(failure(stream), "outside of any allocation");
  }
}

TEST(CudaEmulatorMemory, OverrunsAreToldAtTheFree) {
  const DeviceStream stream;
  const std::size_t before = tessera_emulator::overruns();
  for (const int at : {0, 9, 10, -1}) {
    auto* const memory = static_cast<float*>(cuda::allocate(0, 10 * sizeof(float)));
    launch(write_kernel, 1, 1, 0, stream.launch(), memory, at);
    stream.synchronize();
    cuda::deallocate(memory);
  }
  EXPECT_EQ(tessera_emulator::overruns(), before + 2);
}

TEST(CudaEmulatorMemory, NewMemoryIsNaN) {
  const DeviceStream stream;
  void* const memory = cuda::allocate(0, 4);
  float value = 0;
  cuda::copy(&value, memory, 4, stream.get());
  EXPECT_TRUE(std::isnan(value));
  cuda::deallocate(memory);
}

TEST(CudaEmulatorMemory, MemoryRunsOut) {
  const auto before = cuda::memory_info(3);
  EXPECT_EQ(cuda::allocate(3, before.total + 1), nullptr);
  void* const memory = cuda::allocate(3, 1 << 20);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0u);
  EXPECT_EQ(cuda::memory_info(3).free, before.free - (1 << 20));
  EXPECT_EQ(cuda::allocate(3, before.total - (1 << 20) + 1), nullptr);
  cuda::deallocate(memory);
  EXPECT_EQ(cuda::memory_info(3).free, before.free);
}

TEST(CudaEmulatorMemory, LaunchesAreChecked) {
  const DeviceStream stream;
  DeviceBuffer<float> values(stream, zeros<float>(1));
  const auto start = [&](dim3 grid, dim3 block) {
    launch(add_one_kernel, grid, block, 0, stream.launch(), values.data(), 1);
  };
  EXPECT_THROW(start(1, 1025), DeviceError);
  EXPECT_THROW(start(1, dim3(64, 32)), DeviceError);
  EXPECT_THROW(start(1, 0), DeviceError);
  EXPECT_THROW(start(dim3(1, 65536), 1), DeviceError);
  start(0, 32);  // nothing to do
  cuda::use_device(1);
  EXPECT_THROW(start(1, 32), DeviceError) << "the stream is device 0's";
  cuda::use_device(0);
  start(1, 32);
  EXPECT_EQ(values.host()[0], 1.0f);
  EXPECT_THROW(cuda::use_device(8), DeviceError);
}

TEST(CudaEmulatorDeathTest, ProtectedMemoryCannotBeReadByTheHost) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const DeviceStream stream;
  DeviceBuffer<float> values(stream, zeros<float>(4));
  EXPECT_EQ(*values.data(), 0.0f);
  EXPECT_DEATH(
      {
        tessera_emulator::set_protection(true);
        launch(add_one_kernel, 1, 4, 0, stream.launch(), values.data(), 4);  // kernels may
        if (values.host()[0] != 1.0f) std::_Exit(0);
        static_cast<void>(*static_cast<volatile float*>(values.data()));
        std::_Exit(0);
      },
      "");
}

TEST(CudaEmulatorDeathTest, FarOutsideOfAnAllocationCrashes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const DeviceStream stream;
        DeviceBuffer<float> values(stream, zeros<float>(4));
        launch(write_kernel, 1, 1, 0, stream.launch(), values.data(), 2048);
        stream.synchronize();
        std::_Exit(0);
      },
      "");
}
}  // namespace
}  // namespace tessera::test

#endif
