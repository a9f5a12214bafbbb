#pragma once
/// What every CUDA kernel is written with: launching, 16-byte access, conversions, sums over warps and
/// blocks. Reductions have a fixed order, so results do not depend on timing. Blocks that use them have a
/// multiple of 32 threads.

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "kernels/api/launch.hpp"
#include "kernels/cuda/loading.hpp"
#include "tessera/base/dtype.hpp"
#include "tessera/base/error.hpp"
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#if defined(TESSERA_CUDA_EMULATED)
/// Declares `Type* name`: the dynamic shared memory of the block, 16-byte aligned.
#define TESSERA_DYNAMIC_SHARED(Type, name) \
  Type* const name = reinterpret_cast<Type*>(::tessera_emulator::dynamic_shared())
#else
/// Declares `Type* name`: the dynamic shared memory of the block, 16-byte aligned.
#define TESSERA_DYNAMIC_SHARED(Type, name)                              \
  extern __shared__ __align__(16) unsigned char tessera_shared_bytes[]; \
  Type* const name = reinterpret_cast<Type*>(tessera_shared_bytes)
#endif

namespace tessera::kernels::cuda {

constexpr int kWarp = 32;
/// Elements of one 16-byte access.
template <typename T>
constexpr int kPack = static_cast<int>(16 / sizeof(T));

template <typename A, typename B>
__host__ __device__ constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

// ---- Host ----

/// Throws DeviceError naming the call and the runtime's own words.
inline void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps the last error until it is read
  throw DeviceError(tessera::detail::concat(call, " failed: ", cudaGetErrorString(code), " (",
                                            cudaGetErrorName(code), ")"));
}

inline bool is_aligned(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

/// A size of the current device; asked once per device.
template <cudaDeviceAttr attribute>
int device_attribute() {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<int>& slot = known[static_cast<std::size_t>(device) % known.size()];
  int size = slot.load(std::memory_order_relaxed);
  if (size == 0) {
    check(cudaDeviceGetAttribute(&size, attribute, device), "cudaDeviceGetAttribute");
    slot.store(size, std::memory_order_relaxed);
  }
  return size;
}
inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

/// Starts `kernel` on where.stream, whose device is the current one; a grid of no blocks is nothing to do.
/// Arguments are converted to the kernel's parameters and copied. `shared_bytes` may exceed 48 KB.
/// Errors: DeviceError naming the sizes.
template <typename... P, typename... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared_bytes, const Launch& where,
            A&&... args) {
  static_assert(sizeof...(P) == sizeof...(A), "a kernel takes as many arguments as it has parameters");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(where.stream);
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  }
  std::tuple<P...> values(std::forward<A>(args)...);
#if defined(TESSERA_CUDA_EMULATED)
  const cudaError_t code = tessera_emulator::launch_kernel(function, grid, block, shared_bytes, stream,
                                                           [kernel, values] { std::apply(kernel, values); });
#else
  const cudaError_t code = std::apply(
      [&](auto&... value) {
        void* pointers[sizeof...(P) + 1] = {static_cast<void*>(&value)..., nullptr};
        return cudaLaunchKernel(function, grid, block, pointers, shared_bytes, stream);
      },
      values);
#endif
  if (code == cudaSuccess) return;
  check(code, tessera::detail::concat("launch of a kernel with grid ", grid.x, "x", grid.y, "x", grid.z,
                                      ", block ", block.x, "x", block.y, "x", block.z, ", ", shared_bytes,
                                      " bytes of shared memory")
                  .c_str());
}

// ---- Conversions ----

__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__host__ __device__ __forceinline__ float to_float(bfloat16 x) { return static_cast<float>(x); }
__host__ __device__ __forceinline__ float to_float(float16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  return static_cast<float>(x);
#endif
}

/// Rounds to nearest even.
template <typename T>
__host__ __device__ __forceinline__ T from_float(float x) {
  return T(x);
}
#if defined(__CUDA_ARCH__)
template <>
__host__ __device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
  bfloat16 result;
  result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return result;
}
template <>
__host__ __device__ __forceinline__ float16 from_float<float16>(float x) {
  float16 result;
  result.bits = __half_as_ushort(__float2half_rn(x));
  return result;
}
#endif

// ---- Vector access ----

namespace detail {

// clang-format off
template <int Bytes> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<2> { using type = unsigned short; };
// clang-format on

/// N elements as they lie in memory, moved by one access.
template <typename T, int N>
union Chunk {
  typename Word<N* static_cast<int>(sizeof(T))>::type word;
  T items[N];
  __host__ __device__ Chunk() {}
};

/// The access a GPU would fault on is refused by the emulator too.
template <typename Word>
__device__ __forceinline__ void check_access([[maybe_unused]] const Word* p) {
#if defined(TESSERA_CUDA_EMULATED)
  ::tessera_emulator::check_access(p, sizeof(Word));
#endif
}

template <typename T>
__device__ __forceinline__ void from_floats(T* items, const float* values, int count) {
  for (int i = 0; i < count; ++i) items[i] = from_float<T>(values[i]);
}
#if defined(__CUDA_ARCH__)
// Two at a time: one instruction for both.
__device__ __forceinline__ void from_floats(bfloat16* items, const float* values, int count) {
  int i = 0;
#pragma unroll
  for (; i + 1 < count; i += 2) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
    items[i].bits = __bfloat16_as_ushort(pair.x);
    items[i + 1].bits = __bfloat16_as_ushort(pair.y);
  }
  if (i < count) items[i] = from_float<bfloat16>(values[i]);
}
__device__ __forceinline__ void from_floats(float16* items, const float* values, int count) {
  int i = 0;
#pragma unroll
  for (; i + 1 < count; i += 2) {
    const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
    items[i].bits = __half_as_ushort(pair.x);
    items[i + 1].bits = __half_as_ushort(pair.y);
  }
  if (i < count) items[i] = from_float<float16>(values[i]);
}
#endif

/// Elements one access moves when N are wanted.
template <typename T, int N>
constexpr int kStep = N < kPack<T> ? N : kPack<T>;

}  // namespace detail

/// N elements from `p`, one access for each 16 bytes; p is aligned to the access. N is a power of two.
template <typename T, int N>
__device__ __forceinline__ void load(const T* p, float (&out)[N]) {
  constexpr int kStep = detail::kStep<T, N>;
  using Chunk = detail::Chunk<T, kStep>;
  static_assert(N % kStep == 0, "whole accesses only");
#pragma unroll
  for (int begin = 0; begin < N; begin += kStep) {
    Chunk chunk;
    const auto* word = reinterpret_cast<const decltype(chunk.word)*>(p + begin);
    detail::check_access(word);
    chunk.word = *word;
#pragma unroll
    for (int i = 0; i < kStep; ++i) out[begin + i] = to_float(chunk.items[i]);
  }
}

/// The reverse of load, rounding to nearest even.
template <typename T, int N>
__device__ __forceinline__ void store(T* p, const float (&in)[N]) {
  constexpr int kStep = detail::kStep<T, N>;
  using Chunk = detail::Chunk<T, kStep>;
  static_assert(N % kStep == 0, "whole accesses only");
#pragma unroll
  for (int begin = 0; begin < N; begin += kStep) {
    Chunk chunk;
    detail::from_floats(chunk.items, in + begin, kStep);
    auto* word = reinterpret_cast<decltype(chunk.word)*>(p + begin);
    detail::check_access(word);
    *word = chunk.word;
  }
}

// ---- Reductions ----

/// Two numbers that are added up together.
struct Pair {
  float first, second;
};
__device__ __forceinline__ Pair operator+(Pair a, Pair b) { return {a.first + b.first, a.second + b.second}; }

namespace detail {

struct Plus {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// x of the lane whose number differs in the bits of `step`.
template <typename T>
__device__ __forceinline__ T across(T x, int step) {
  return __shfl_xor_sync(0xffffffffu, x, step);
}
__device__ __forceinline__ Pair across(Pair x, int step) {
  return {across(x.first, step), across(x.second, step)};
}

/// The same bits in every lane: each level adds the same two numbers in both halves.
template <typename T, typename Combine>
__device__ __forceinline__ T warp_reduce(T x, Combine combine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = combine(x, across(x, step));
  return x;
}

template <typename T, typename Combine>
__device__ __forceinline__ T block_reduce(T x, T neutral, T* shared, Combine combine) {
  const int thread = static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
  const int warps = static_cast<int>(blockDim.x * blockDim.y * blockDim.z) / kWarp;
  const int lane = thread % kWarp;
  x = warp_reduce(x, combine);
  if (lane == 0) shared[thread / kWarp] = x;
  __syncthreads();
  x = warp_reduce(lane < warps ? shared[lane] : neutral, combine);
  __syncthreads();  // the caller may write `shared` again
  return x;
}

}  // namespace detail

/// Over the 32 lanes, which must all be there; every lane gets the result.
__device__ __forceinline__ float warp_sum(float x) { return detail::warp_reduce(x, detail::Plus{}); }
__device__ __forceinline__ double warp_sum(double x) { return detail::warp_reduce(x, detail::Plus{}); }
__device__ __forceinline__ Pair warp_sum(Pair x) { return detail::warp_reduce(x, detail::Plus{}); }
__device__ __forceinline__ float warp_max(float x) { return detail::warp_reduce(x, detail::Larger{}); }

/// Over the block; every thread calls it and gets the result. `shared` has kWarp elements, free before and
/// after. Two barriers.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  return detail::block_reduce(x, 0.0f, shared, detail::Plus{});
}
__device__ __forceinline__ double block_sum(double x, double* shared) {
  return detail::block_reduce(x, 0.0, shared, detail::Plus{});
}
__device__ __forceinline__ Pair block_sum(Pair x, Pair* shared) {
  return detail::block_reduce(x, Pair{}, shared, detail::Plus{});
}
__device__ __forceinline__ float block_max(float x, float* shared) {
  return detail::block_reduce(x, -INFINITY, shared, detail::Larger{});
}

}  // namespace tessera::kernels::cuda
