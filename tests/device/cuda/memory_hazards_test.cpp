/// Memory of a device while a stream waits for another rank, as a message that is received ahead of need
/// makes it wait: nothing may wait for everything on the device then. Only the emulator can be made to wait
/// so.

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <vector>

#include "tessera/device/exec_ctx.hpp"
#include "tessera/device/graph.hpp"
#if __has_include("emulator.hpp")  // only an emulated build has its folder in the include path
#include "cuda_runtime.h"
#include "emulator.hpp"

namespace tessera {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr auto kPatience = std::chrono::seconds(60);

/// A stream that stands still until this is opened.
class Gate {
 public:
  explicit Gate(const Stream& stream) {
    const cudaError_t code =
        tessera_emulator::enqueue(static_cast<cudaStream_t>(stream.native()), "a receive",
                                  [opened = opened_.get_future().share()] { opened.wait(); });
    EXPECT_EQ(code, cudaSuccess);
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() {
    if (!open_) opened_.set_value();
    open_ = true;
  }

 private:
  std::promise<void> opened_;
  bool open_ = false;
};

/// Whether `work` ends while `gate` is shut; then it is opened.
template <typename Work>
bool ends_behind(Gate& gate, Work work) {
  auto ended = std::async(std::launch::async, std::move(work));
  const bool in_time = ended.wait_for(kPatience) == std::future_status::ready;
  gate.open();
  ended.get();
  return in_time;
}

TEST(CudaMemoryHazards, NearTheLimitWhatIsCachedGoesBackWithoutWaitingForOtherStreams) {
  const ExecCtx ctx = ExecCtx::cuda(6);
  const Stream lane(ctx.device());
  tessera_emulator::set_device_memory(256 * kMiB);
  {
    Gate gate(lane);
    const bool in_time = ends_behind(gate, [&] {
      for (const std::size_t size : {96, 128, 200, 64, 224}) {
        void* const memory = ctx.allocator->allocate(size * kMiB);  // fits only where the others are gone
        ctx.allocator->release(memory);
      }
    });
    EXPECT_TRUE(in_time) << "the allocator waited for a stream that waits for another rank";
    EXPECT_EQ(ctx.allocator->stats().system_bytes, 224 * kMiB);
  }
  tessera_emulator::set_device_memory(8192 * kMiB);
}

TEST(CudaMemoryHazards, WhatIsTrimmedMayStillBeInUse) {
  const ExecCtx ctx = ExecCtx::cuda(6);
  Gate gate(*ctx.stream);
  void* const memory = ctx.allocator->allocate(40 * kMiB);
  bool written = false;
  tessera_emulator::enqueue(static_cast<cudaStream_t>(ctx.stream->native()), "a kernel", [memory, &written] {
    static_cast<char*>(memory)[40 * kMiB - 1] = 1;  // crashes where it was given back too early
    written = true;
  });
  ctx.allocator->release(memory);
  EXPECT_TRUE(ends_behind(gate, [&] { ctx.allocator->trim(); }));
  EXPECT_EQ(ctx.allocator->stats().system_bytes, 0u);
  ctx.stream->synchronize();
  EXPECT_TRUE(written);
}

TEST(CudaMemoryHazards, LongCopiesFromTheHostPinARing) {
  const ExecCtx ctx = ExecCtx::cuda(6);
  const std::vector<char> source(64 * kMiB, 'x');
  void* const target = ctx.allocator->allocate(source.size());
  const std::size_t before = tessera_emulator::pinned_bytes();
  Gate gate(*ctx.stream);
  auto copied = std::async(std::launch::async,
                           [&] { ctx.allocator->copy_from_host(target, source.data(), source.size()); });
  copied.wait_for(std::chrono::milliseconds(200));  // as far as it comes
  gate.open();
  copied.get();
  EXPECT_LE(tessera_emulator::pinned_bytes() - before, 16 * kMiB);
  ctx.stream->synchronize();
  EXPECT_EQ(static_cast<char*>(target)[source.size() - 1], 'x');
  ctx.allocator->release(target);
}

TEST(CudaMemoryHazards, BatchesOfStepsAheadNeverWait) {
  const ExecCtx ctx = ExecCtx::cuda(6);
  const std::vector<char> source(1000, 'x');
  void* const target = ctx.allocator->allocate(source.size());
  Gate gate(*ctx.stream);
  EXPECT_TRUE(ends_behind(gate, [&] {
    for (int i = 0; i < 100; ++i) ctx.allocator->copy_from_host(target, source.data(), source.size());
  }));
  ctx.stream->synchronize();
  ctx.allocator->release(target);
}

/// NCCL ends no communicator while a graph could launch its calls.
TEST(CudaMemoryHazards, GraphsGoWhateverTheDeviceSays) {
  const std::size_t before = tessera_emulator::graph_executables();
  {
    const ExecCtx ctx = ExecCtx::cuda(5);
    bool fails = false;
    StreamGraph graph(ctx.stream);
    const auto work = [&] {
      tessera_emulator::enqueue(static_cast<cudaStream_t>(ctx.stream->native()), "a kernel", [fails] {
        if (fails) throw tessera_emulator::Fault("planted");
      });
    };
    graph.run("a", work);
    graph.run("a", work);
    EXPECT_EQ(tessera_emulator::graph_executables(), before + 1);
    fails = true;
    graph.run("a", work);
  }
  EXPECT_EQ(tessera_emulator::graph_executables(), before);
}

/// Two streams of one hardware queue: what cannot begin holds up what was launched later on the other.
TEST(CudaEmulator, StreamsShareHardwareQueues) {
  for (const int queues : {1, 2}) {
    tessera_emulator::set_connections(queues);
    const Device device{DeviceType::cuda, 4};
    Stream first(device), second(device);
    tessera_emulator::set_connections(32);
    Stream lane(device);
    Gate gate(lane);
    Event arrived;
    lane.record(arrived);
    first.wait(arrived);
    Event done;
    second.record(done);
    const auto begin = std::chrono::steady_clock::now();
    const auto patience = queues == 1 ? std::chrono::milliseconds(100) : std::chrono::milliseconds(60000);
    while (!done.done() && std::chrono::steady_clock::now() - begin < patience) std::this_thread::yield();
    EXPECT_EQ(done.done(), queues == 2);
    gate.open();
    second.synchronize();
    EXPECT_TRUE(done.done());
  }
}

}  // namespace
}  // namespace tessera
#endif
