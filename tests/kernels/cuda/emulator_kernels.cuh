#pragma once
/// Kernels that try the emulator: right ones and ones with a mistake.

#include "kernels/cuda/common.cuh"

namespace tessera::test {

namespace kc = kernels::cuda;

/// out[thread][0..5]: the shuffles, a double's and a segmented one.
inline __global__ void shuffle_kernel(double* out) {
  const int lane = static_cast<int>(threadIdx.x);
  double* mine = out + threadIdx.x * 6;
  mine[0] = __shfl_sync(0xffffffffu, lane * 10, 7);
  mine[1] = __shfl_xor_sync(0xffffffffu, static_cast<float>(lane), 5);
  mine[2] = __shfl_down_sync(0xffffffffu, static_cast<unsigned>(lane), 4u);
  mine[3] = __shfl_up_sync(0xffffffffu, lane, 3u);
  mine[4] = __shfl_xor_sync(0xffffffffu, lane + 0.5, 1);
  mine[5] = __shfl_down_sync(0xffffffffu, lane, 3u, 8);
}

/// out[thread]: ballot, any, all, and how many of the block are odd, of one block of 64 threads.
inline __global__ void vote_kernel(unsigned* out) {
  const bool odd = threadIdx.x % 2 == 1;
  unsigned* mine = out + threadIdx.x * 6;
  mine[0] = __ballot_sync(0xffffffffu, odd);
  mine[1] = static_cast<unsigned>(__any_sync(0xffffffffu, threadIdx.x == 40));
  mine[2] = static_cast<unsigned>(__all_sync(0xffffffffu, threadIdx.x != 40));
  mine[3] = static_cast<unsigned>(__syncthreads_count(odd));
  mine[4] = static_cast<unsigned>(__syncthreads_or(threadIdx.x == 63));
  mine[5] = static_cast<unsigned>(__syncthreads_and(threadIdx.x != 63));
}

/// Lanes 20 and up end first; the others sum what is left.
inline __global__ void early_exit_kernel(int* out) {
  if (threadIdx.x >= 20) return;
  int sum = 1;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_down_sync(0xffffffffu, sum, static_cast<unsigned>(step));
    if (threadIdx.x + static_cast<unsigned>(step) < 20) sum += other;
  }
  if (threadIdx.x == 0) *out = sum;
}

/// Two sums and a maximum one after the other: the shared array is used again at once.
inline __global__ void block_sums_kernel(const float* in, float* sums, double* precise, float* largest) {
  __shared__ float shared[kc::kWarp];
  __shared__ double wide[kc::kWarp];
  const unsigned thread = threadIdx.x + blockDim.x * threadIdx.y;
  const float x = in[blockIdx.x * blockDim.x * blockDim.y + thread];
  const float sum = kc::block_sum(x, shared), twice = kc::block_sum(2 * x, shared);
  const float most = kc::block_max(x, shared);
  const double exact = kc::block_sum(static_cast<double>(x), wide);
  if (thread != blockDim.x * blockDim.y - 1) return;
  sums[blockIdx.x] = sum + twice;
  precise[blockIdx.x] = exact;
  largest[blockIdx.x] = most;
}

/// Reverses a block through shared memory.
template <bool kBarrier>
__global__ void reverse_kernel(const int* in, int* out) {
  TESSERA_DYNAMIC_SHARED(int, tile);
  tile[threadIdx.x] = in[threadIdx.x];
  if constexpr (kBarrier) __syncthreads();
  out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}

/// Whether all dynamic shared memory is NaN when a block begins, which it then no longer is.
inline __global__ void fresh_shared_kernel(int count, int* fresh) {
  TESSERA_DYNAMIC_SHARED(float, values);
  if (threadIdx.x != 0) return;
  bool all = true;
  for (int i = 0; i < count; ++i) {
    all = all && values[i] != values[i];
    values[i] = 0;
  }
  fresh[blockIdx.x] = all;
}

inline __global__ void shared_overrun_kernel(int count) {
  TESSERA_DYNAMIC_SHARED(float, values);
  values[count + static_cast<int>(threadIdx.x)] = 1;
}

inline __global__ void count_kernel(unsigned* total, float* sum, int* largest) {
  atomicAdd(total, 1u);
  atomicAdd(sum, 0.5f);
  atomicMax(largest, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
}

inline __global__ void divergent_block_kernel() {
  if (threadIdx.x < 40) __syncthreads();
}
inline __global__ void divergent_warp_kernel(int* out) {
  if (threadIdx.x == 3) {
    __syncwarp();
  } else {
    out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  }
}
/// Lane 0 waits for the block where the others wait for the warp.
inline __global__ void mixed_wait_kernel() {
  if (threadIdx.x == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

inline __global__ void trap_kernel() {
  if (blockIdx.x == 1 && threadIdx.x == 2) __trap();
  __syncthreads();
}

template <typename T>
__global__ void vector_copy_kernel(const T* in, T* out) {
  float values[kc::kPack<T>];
  kc::load(in, values);
  kc::store(out, values);
}

inline __global__ void write_kernel(float* p, int at) { p[at] = 1; }

inline __global__ void add_one_kernel(float* p, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) p[i] += 1;
}

}  // namespace tessera::test
