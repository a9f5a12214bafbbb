#include "tessera/device/exec_ctx.hpp"

#include <sched.h>

#include <algorithm>

#include "device/cuda.hpp"
#include "device/host_memory.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace

ExecCtx ExecCtx::cpu(int threads, std::uint64_t seed) {
  return {std::make_shared<Stream>(threads > 0 ? threads : available_cores()),
          std::make_shared<CachingAllocator>(), seed};
}

ExecCtx ExecCtx::cuda(int index, std::uint64_t seed) {
  const CudaDevices devices = cuda_devices();
  TESSERA_ENSURE(ConfigError, devices.count > 0, "device.type is cuda, but ", devices.why_none);
  TESSERA_ENSURE(ConfigError, index >= 0 && index < devices.count, "there is no CUDA device ", index,
                 ": this process sees ", devices.count,
                 " (counted from 0). Start as many processes on a host as it has GPUs");
  auto stream = std::make_shared<Stream>(Device{DeviceType::cuda, index});
  auto allocator = std::make_shared<CachingAllocator>(stream);
  ExecCtx ctx{std::move(stream), std::move(allocator), seed};
  ctx.logit_bytes = kLogitBytesOnCuda;
  return ctx;
}

ExecCtx ExecCtx::meta(std::uint64_t seed) {
  auto stream = std::make_shared<Stream>(Device{DeviceType::meta});
  auto allocator = std::make_shared<CachingAllocator>(stream);
  return {std::move(stream), std::move(allocator), seed};
}

CudaDevices cuda_devices() { return {cuda::device_count(), cuda::why_none()}; }

std::string describe_cuda_device(int index) { return cuda::describe(index); }

std::int64_t memory_bytes_of(Device device) {
  if (!device.is_cuda()) return host_memory_bytes();
  return static_cast<std::int64_t>(cuda::total_memory(device.index));
}

}  // namespace tessera
