/// The device's clock, read where work runs.

#include "kernels/api/backends.hpp"
#include "kernels/cuda/common.cuh"
#if defined(TESSERA_CUDA_EMULATED)
#include "tessera/base/clock.hpp"
#endif

namespace tessera::kernels::cuda {
namespace {

/// Nanoseconds of a clock that all multiprocessors of a device share.
__device__ std::int64_t device_time_ns() {
#if defined(TESSERA_CUDA_EMULATED)
  return static_cast<std::int64_t>(now_s() * 1e9);
#else
  std::int64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
#endif
}

__global__ void __launch_bounds__(1) write_time_kernel(std::int64_t* to) { *to = device_time_ns(); }

}  // namespace

void write_time(std::int64_t* to, void* stream) {
  launch(write_time_kernel, dim3(1), dim3(1), 0, Launch{.stream = stream}, to);
}

TESSERA_KERNEL_FILE(write_time_kernel);

}  // namespace tessera::kernels::cuda
