/// Sums over parts whose number and bounds depend on sizes alone: a first kernel writes every part's sum to
/// scratch, a second adds them in a fixed order.

#include "kernels/api/reduce.hpp"

#include <algorithm>

#include "kernels/cuda/common.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLines = kThreads / kWarp;  // rows a block of column_sum reads at once

/// The sum over the kLines lines of `lines` at each of its `Width` columns, handed to `put(column, sum)`.
template <int Width, typename Put>
__device__ __forceinline__ void add_lines(const float (&lines)[kLines][Width], Put put) {
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.y) * kWarp + static_cast<int>(threadIdx.x); c < Width;
       c += kThreads) {
    float total = 0.0f;
#pragma unroll
    for (int line = 0; line < kLines; ++line) total += lines[line][c];
    put(c, total);
  }
}

/// Block (x, y): part y of the rows, 32 N columns. A warp reads along a row.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) column_parts_kernel(ColumnSum p, std::int64_t parts) {
  __shared__ float lines[kLines][kWarp * N];
  const std::int64_t part = blockIdx.y;
  const std::int64_t begin = p.rows * part / parts, end = p.rows * (part + 1) / parts;
  const std::int64_t first_col = static_cast<std::int64_t>(blockIdx.x) * kWarp * N;
  const std::int64_t col = first_col + threadIdx.x * N;
  float total[N] = {};
  if (col < p.cols) {
    const T* x = static_cast<const T*>(p.x) + col;
#pragma unroll 4
    for (std::int64_t r = begin + threadIdx.y; r < end; r += kLines) {
      float v[N];
      load(x + r * p.ld, v);
#pragma unroll
      for (int j = 0; j < N; ++j) total[j] += v[j];
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) lines[threadIdx.y][threadIdx.x * N + j] = total[j];
  add_lines(lines, [&](int c, float sum) {
    if (first_col + c < p.cols) p.scratch[part * p.cols + first_col + c] = sum;
  });
}

__global__ void __launch_bounds__(kThreads) column_total_kernel(ColumnSum p, int parts) {
  __shared__ float lines[kLines][kWarp];
  const std::int64_t first_col = static_cast<std::int64_t>(blockIdx.x) * kWarp;
  const std::int64_t col = first_col + threadIdx.x;
  float total = 0.0f;
  if (col < p.cols) {
#pragma unroll 8
    for (int part = static_cast<int>(threadIdx.y); part < parts; part += kLines)
      total += p.scratch[part * p.cols + col];
  }
  lines[threadIdx.y][threadIdx.x] = total;
  add_lines(lines, [&](int c, float sum) {
    float* out = p.out + first_col + c;
    if (first_col + c < p.cols) *out = p.beta != 0.0f ? sum + p.beta * *out : sum;
  });
}

template <typename T, int N>
void column_parts(const ColumnSum& p, int parts, const Launch& where) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.cols, std::int64_t{kWarp * N})),
                  static_cast<unsigned>(parts));
  launch(column_parts_kernel<T, N>, grid, dim3(kWarp, kLines), 0, where, p, parts);
}

constexpr int kSumPack = 4;
/// Fewer floats than this are not worth a block.
constexpr std::int64_t kSmallestPart = 32 * kThreads;

/// What a sum adds up, in double.
struct Identity {
  __device__ static double of(float x) { return static_cast<double>(x); }
};
struct Square {
  __device__ static double of(float x) { return static_cast<double>(x) * static_cast<double>(x); }
};

/// Adds this thread's part of x[0] .. x[n - 1] to `total`.
template <typename Map, bool kAligned>
__device__ __forceinline__ void add_part(const float* x, std::int64_t n, double (&total)[kSumPack]) {
  std::int64_t i = threadIdx.x * kSumPack;
#pragma unroll 4
  for (; i + kSumPack <= n; i += kThreads * kSumPack) {
    float v[kSumPack];
    if constexpr (kAligned) {
      load(x + i, v);
    } else {
#pragma unroll
      for (int j = 0; j < kSumPack; ++j) v[j] = x[i + j];
    }
#pragma unroll
    for (int j = 0; j < kSumPack; ++j) total[j] += Map::of(v[j]);
  }
  for (; i < n; ++i) total[0] += Map::of(x[i]);  // the last few of all, in one thread
}

/// Which float goes to which thread does not depend on alignment, so that the sum does not either.
template <typename Map>
__device__ __forceinline__ void add_part(const float* x, std::int64_t n, double (&total)[kSumPack]) {
  if (reinterpret_cast<std::uintptr_t>(x) % 16 == 0) {
    add_part<Map, true>(x, n, total);
  } else {
    add_part<Map, false>(x, n, total);
  }
}

__device__ __forceinline__ void put_total(const double (&total)[kSumPack], double* scratch) {
  __shared__ double warps[kWarp];
  const double sum = block_sum((total[0] + total[1]) + (total[2] + total[3]), warps);
  if (threadIdx.x == 0) scratch[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const float* x, std::int64_t n, std::int64_t part_size, double* scratch) {
  const std::int64_t begin = min(n, blockIdx.x * part_size), end = min(n, begin + part_size);
  double total[kSumPack] = {};
  add_part<Identity>(x + begin, end - begin, total);
  put_total(total, scratch);
}

/// Block b takes runs b, b + blocks, ...
__global__ void __launch_bounds__(kThreads) sum_squares_kernel(SumSquares p) {
  double total[kSumPack] = {};
  for (std::int64_t i = blockIdx.x; i < p.num_runs; i += gridDim.x) {
    const SumRun run = p.runs[i];
    add_part<Square>(p.x + run.begin, run.count, total);
  }
  put_total(total, p.scratch);
}

__global__ void __launch_bounds__(kThreads)
    sum_total_kernel(const double* scratch, int parts, bool add, double* out) {
  __shared__ double warps[kWarp];
  double total = 0.0;
  for (int part = static_cast<int>(threadIdx.x); part < parts; part += kThreads) total += scratch[part];
  total = block_sum(total, warps);
  if (threadIdx.x == 0) *out = add ? *out + total : total;
}

void add_parts(const double* scratch, int parts, bool add, double* out, const Launch& where) {
  launch(sum_total_kernel, dim3(1), dim3(kThreads), 0, where, scratch, parts, add, out);
}

}  // namespace

void column_sum(const ColumnSum& params, const Launch& where) {
  const auto parts = static_cast<int>(std::clamp<std::int64_t>(params.rows / (2 * kLines), 1, kReduceParts));
  visit_float(params.dtype, "column_sum", [&](auto t) {
    using T = decltype(t);
    const bool aligned = params.cols % kPack<T> == 0 && params.ld % kPack<T> == 0 && is_aligned(params.x, 16);
    aligned ? column_parts<T, kPack<T>>(params, parts, where) : column_parts<T, 1>(params, parts, where);
  });
  launch(column_total_kernel, dim3(static_cast<unsigned>(ceil_div(params.cols, std::int64_t{kWarp}))),
         dim3(kWarp, kLines), 0, where, params, parts);
}

void sum_squares(const SumSquares& params, const Launch& where) {
  const auto parts = static_cast<int>(std::min<std::int64_t>(params.num_runs, kSumParts));
  launch(sum_squares_kernel, dim3(static_cast<unsigned>(parts)), dim3(kThreads), 0, where, params);
  add_parts(params.scratch, parts, true, params.out, where);
}

void sum(const Sum& params, const Launch& where) {
  const auto parts = static_cast<int>(std::clamp<std::int64_t>(params.n / kSmallestPart, 1, kSumParts));
  constexpr std::int64_t kStep = kThreads * kSumPack;
  const std::int64_t part_size = ceil_div(ceil_div(params.n, std::int64_t{parts}), kStep) * kStep;
  launch(sum_parts_kernel, dim3(static_cast<unsigned>(parts)), dim3(kThreads), 0, where, params.x, params.n,
         part_size, params.scratch);
  add_parts(params.scratch, parts, params.add, params.out, where);
}

TESSERA_KERNEL_FILE(column_total_kernel);

}  // namespace tessera::kernels::cuda
