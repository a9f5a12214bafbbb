#pragma once
/// Kernels that treat all elements alike. An Op says what happens to N consecutive ones:
///   static constexpr int kUnroll;                     packs a thread has in flight
///   template <int N> struct Values;                   what is kept of elements i .. i + N - 1
///   template <int N> void load(int64 i, Values<N>&) const;
///   template <int N> void store(int64 i, Values<N>&) const;
/// A thread loads all its packs before it stores one: the compiler could not move a load over a store that
/// may be to the same memory. In place is fine, since only element i is written from element i.

#include <type_traits>

#include "kernels/cuda/common.cuh"

namespace tessera::kernels::cuda {

constexpr int kElementwiseThreads = 256;
/// Blocks a multiprocessor must have room for: 64 registers a thread, which are enough for all there is here.
constexpr int kElementwiseBlocks = 4;

template <typename Op, int N>
constexpr int kElementwiseUnroll = N == 1 ? 4 : Op::kUnroll;

/// Count packs of N, `stride` elements apart, the first at element i.
template <int N, int Count, typename Op>
__device__ __forceinline__ void apply_packs(const Op& op, std::int64_t i, std::int64_t stride) {
  typename Op::template Values<N> values[Count];
#pragma unroll
  for (int u = 0; u < Count; ++u) op.template load<N>(i + u * stride, values[u]);
#pragma unroll
  for (int u = 0; u < Count; ++u) op.template store<N>(i + u * stride, values[u]);
}

/// The share of this block in packs of N among n elements, whatever the number of blocks; each has
/// kElementwiseThreads threads.
template <int N, typename Op>
__device__ __forceinline__ void for_packs(const Op& op, std::int64_t n) {
  constexpr int kUnroll = kElementwiseUnroll<Op, N>;
  constexpr std::int64_t kStride = std::int64_t{kElementwiseThreads} * N;  // between packs of a thread
  const std::int64_t whole = n / N * N;
  std::int64_t i = blockIdx.x * kStride * kUnroll + threadIdx.x * N;
  for (; i < whole; i += gridDim.x * kStride * kUnroll) {
    if (i + (kUnroll - 1) * kStride < whole) {
      apply_packs<N, kUnroll>(op, i, kStride);
    } else {
      for (std::int64_t j = i; j < whole; j += kStride) apply_packs<N, 1>(op, j, kStride);
    }
  }
  if constexpr (N > 1) {
    const std::int64_t last = whole + threadIdx.x;
    if (blockIdx.x + 1 == gridDim.x && last < n) apply_packs<1, 1>(op, last, 1);
  }
}

template <int N, typename Op>
__global__ void __launch_bounds__(kElementwiseThreads, kElementwiseBlocks)
    each_pack_kernel(Op op, std::int64_t n) {
  for_packs<N>(op, n);
}

/// Applies `op` to n elements in packs of N, with as many blocks as there is work for.
template <int N, typename Op>
void each_pack(const Op& op, std::int64_t n, const Launch& where) {
  constexpr std::int64_t kPerBlock =
      static_cast<std::int64_t>(kElementwiseThreads) * kElementwiseUnroll<Op, N> * N;
  // More than 2^31 - 1 blocks would be 2^39 elements and more: no memory holds them.
  launch(each_pack_kernel<N, Op>, dim3(static_cast<unsigned>(ceil_div(n, kPerBlock))),
         dim3(kElementwiseThreads), 0, where, op, n);
}

/// The pack of 16 bytes of the smallest of some types.
template <typename... T>
constexpr int kWidestPack = 0;
template <typename T>
constexpr int kWidestPack<T> = kPack<T>;
template <typename T, typename... Rest>
constexpr int kWidestPack<T, Rest...> = kPack<T> > kWidestPack<Rest...> ? kPack<T> : kWidestPack<Rest...>;

/// A pack of some elements of one buffer.
template <int N>
struct PackOf {
  float x[N];
};
/// Packs at the same place of two buffers.
template <int N>
struct TwoPacks {
  float x[N], y[N];
};

/// Row and column of element i of a matrix with `cols` columns.
struct RowCol {
  std::int64_t row, col;
};
__device__ __forceinline__ RowCol row_col(std::int64_t i, std::int64_t cols) {
  // Unsigned: where both fit into 32 bits, which is nearly always, the division is the short one.
  const auto row =
      static_cast<std::int64_t>(static_cast<std::uint64_t>(i) / static_cast<std::uint64_t>(cols));
  return {row, i - row * cols};
}

}  // namespace tessera::kernels::cuda
