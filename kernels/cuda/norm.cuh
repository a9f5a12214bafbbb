#pragma once
/// How the norm kernels spread a row over threads, and which of their copies fits a row.

#include "kernels/api/norm.hpp"
#include "kernels/cuda/rows.cuh"

namespace tessera::kernels::cuda {

constexpr int kNormWarps = 4;           // rows per block where a warp has a row
constexpr int kNormWarpElements = 32;   // of a row in one of its warp's threads
constexpr int kNormBlockElements = 16;  // of a row in one of its block's threads

/// The threads that share a row: one warp of several, or the block. Pack k of thread t holds the columns
/// from base + (k * threads + t) * kColumns on; what does not fit at once comes with the next base.
template <typename R, typename T, bool kBlock,
          int kPerThread = kBlock ? kNormBlockElements : kNormWarpElements>
struct RowTeam {
  static constexpr int kElements = kPerThread;
  static constexpr int kWidth = kColumns<R, T>;
  static constexpr int kPacks = kElements / kWidth;
  using Values = float[kPacks][kWidth];

  __device__ static int threads() { return kBlock ? static_cast<int>(blockDim.x) : kWarp; }
  __device__ static int thread() { return static_cast<int>(kBlock ? threadIdx.x : threadIdx.x % kWarp); }
  __device__ static std::int64_t first_row() {
    return kBlock ? blockIdx.x : std::int64_t{blockIdx.x} * kNormWarps + threadIdx.x / kWarp;
  }
  __device__ static std::int64_t row_step() { return std::int64_t{gridDim.x} * (kBlock ? 1 : kNormWarps); }
  __device__ static int span() { return threads() * kElements; }
  __device__ static int column(int base, int pack) { return base + (pack * threads() + thread()) * kWidth; }
  template <typename X>
  __device__ static X sum(X x, X* shared) {
    if constexpr (kBlock) return block_sum(x, shared);
    return warp_sum(x);
  }

  template <bool kWhole, typename X>
  __device__ static __forceinline__ void read_all(const X* row, int base, int cols, Values& out) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) read<kWhole>(row, column(base, k), cols, out[k]);
  }
};

/// Starts the copy of a kernel over rows that fits: `by_warp` for short rows, `by_block` for long ones, both
/// in whole packs, `scattered` where packs would be cut or misaligned.
template <typename Params, typename Kernel>
void launch_rows(const Params& params, bool whole, int max_threads, Kernel by_warp, Kernel by_block,
                 Kernel scattered, const Launch& where) {
  constexpr std::int64_t kMaxBlocks = 0x7fffffff;
  if (params.cols == 0) return;
  if (whole && params.cols <= kWarp * kNormWarpElements) {
    const auto blocks = std::min(kMaxBlocks, ceil_div(params.rows, std::int64_t{kNormWarps}));
    return launch(by_warp, dim3(static_cast<unsigned>(blocks)), dim3(kNormWarps * kWarp), 0, where, params);
  }
  const auto wanted = ceil_div(params.cols, std::int64_t{kNormBlockElements} * kWarp) * kWarp;
  const auto threads = static_cast<unsigned>(std::min<std::int64_t>(max_threads, wanted));
  const auto blocks = static_cast<unsigned>(std::min(kMaxBlocks, params.rows));
  launch(whole ? by_block : scattered, dim3(blocks), dim3(threads), 0, where, params);
}

}  // namespace tessera::kernels::cuda
