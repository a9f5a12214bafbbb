#include "kernels/api/rope.hpp"

#include "kernels/cuda/elementwise.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
/// Heads a thread rotates by the angles it has read once, and how many of them it has in flight.
constexpr int kHeads = 4, kInFlight = 2;

/// N pairs of features.
template <int N>
struct Pairs {
  float a[N], b[N];
};

template <bool kInterleaved, typename T, int N>
__device__ __forceinline__ void load_pairs(const T* x, std::int64_t half, Pairs<N>& p) {
  if constexpr (kInterleaved && N > 1) {
    float both[2 * N];
    load(x, both);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      p.a[j] = both[2 * j];
      p.b[j] = both[2 * j + 1];
    }
  } else {
    load(x, p.a);
    load(x + (kInterleaved ? 1 : half), p.b);
  }
}

template <bool kInterleaved, typename T, int N>
__device__ __forceinline__ void store_pairs(T* x, std::int64_t half, const Pairs<N>& p) {
  if constexpr (kInterleaved && N > 1) {
    float both[2 * N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      both[2 * j] = p.a[j];
      both[2 * j + 1] = p.b[j];
    }
    store(x, both);
  } else {
    store(x, p.a);
    store(x + (kInterleaved ? 1 : half), p.b);
  }
}

template <int N>
struct Angles {
  float cos[N], sin[N];
};

/// Rotates the pairs at x and in the Heads - 1 heads behind.
template <bool kInterleaved, int Heads, typename T, int N>
__device__ __forceinline__ void rotate(T* x, const Rope& p, const Angles<N>& angles) {
  const std::int64_t half = p.rotary_dim / 2;
  Pairs<N> pairs[Heads];
#pragma unroll
  for (int k = 0; k < Heads; ++k) load_pairs<kInterleaved>(x + k * p.head_dim, half, pairs[k]);
#pragma unroll
  for (int k = 0; k < Heads; ++k) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float a = pairs[k].a[j], b = pairs[k].b[j];
      pairs[k].a[j] = a * angles.cos[j] - b * angles.sin[j];
      pairs[k].b[j] = b * angles.cos[j] + a * angles.sin[j];
    }
    store_pairs<kInterleaved>(x + k * p.head_dim, half, pairs[k]);
  }
}

/// A thread: N pairs of kHeads heads of a row. Neighbours take neighbouring pairs.
template <typename T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, 2) rope_kernel(Rope p) {
  const std::int64_t half = p.rotary_dim / 2;
  const std::int64_t packs = half / N, groups = ceil_div(p.heads, std::int64_t{kHeads});
  const RowCol unit = row_col(static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x, packs);
  const RowCol group = row_col(unit.row, groups);
  if (group.row >= p.rows) return;
  const std::int64_t pair = unit.col * N, at = p.positions[group.row] * half + pair;
  Angles<N> angles;
  load(p.cos + at, angles.cos);
  load(p.sin + at, angles.sin);
#pragma unroll
  for (int j = 0; j < N; ++j) angles.sin[j] = p.inverse ? -angles.sin[j] : angles.sin[j];

  const std::int64_t first = group.col * kHeads, last = min(first + kHeads, p.heads);
  T* row = static_cast<T*>(p.x) + group.row * p.row_stride + (kInterleaved ? 2 : 1) * pair;
  for (std::int64_t head = first; head < last; head += kInFlight) {
    T* x = row + head * p.head_dim;
    if (head + kInFlight <= last) {
      rotate<kInterleaved, kInFlight>(x, p, angles);
    } else {
      static_assert(kInFlight == 2, "one head is left");
      rotate<kInterleaved, 1>(x, p, angles);
    }
  }
}

template <typename T, int N>
void rope_of(const Rope& p, const Launch& where) {
  const std::int64_t threads = p.rows * ceil_div(p.heads, std::int64_t{kHeads}) * (p.rotary_dim / 2 / N);
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, std::int64_t{kThreads})));
  launch(p.interleaved ? rope_kernel<T, N, true> : rope_kernel<T, N, false>, grid, dim3(kThreads), 0, where,
         p);
}

}  // namespace

void rope(const Rope& params, const Launch& launch) {
  visit_float(params.dtype, "rope", [&](auto t) {
    using T = decltype(t);
    constexpr int kN = kPack<T>;
    const bool aligned = params.rotary_dim / 2 % kN == 0 && params.head_dim % kN == 0 &&
                         params.row_stride % kN == 0 && is_aligned(params.x, 16) &&
                         is_aligned(params.cos, 16) && is_aligned(params.sin, 16);
    aligned ? rope_of<T, kN>(params, launch) : rope_of<T, 1>(params, launch);
  });
}

TESSERA_KERNEL_FILE(rope_kernel<float, 1, true>);

}  // namespace tessera::kernels::cuda
