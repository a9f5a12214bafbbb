/// The pieces of an RMSNorm whose row ranks share: a warp has a row. Bytes: a and b read once; x and y read,
/// y written.

#include "kernels/api/split_norm.hpp"

#include "kernels/cuda/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kWarps = 4;  // rows per block
constexpr int kThreads = kWarps * kWarp;

__device__ std::int64_t first_row() { return std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; }
__device__ std::int64_t row_step() { return std::int64_t{gridDim.x} * kWarps; }

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads) row_products_kernel(const RowProducts p) {
  constexpr int N = kColumns<T, T>;
  const int lane = static_cast<int>(threadIdx.x % kWarp), cols = static_cast<int>(p.cols);
  for (std::int64_t r = first_row(); r < p.rows; r += row_step()) {
    const T* const a = static_cast<const T*>(p.a) + r * cols;
    const T* const b = static_cast<const T*>(p.b) + r * cols;
    float total = 0.0f;
    for (int i = lane * N; i < cols; i += kWarp * N) {
      float left[N], right[N];
      read<kWhole>(a, i, cols, left);
      read<kWhole>(b, i, cols, right);
#pragma unroll
      for (int j = 0; j < N; ++j) total += left[j] * right[j];
    }
    total = warp_sum(total);
    if (lane == 0) p.out[r] = total;
  }
}

__global__ void __launch_bounds__(kThreads) inverse_roots_kernel(const InverseRoots p) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.n;
       i += std::int64_t{gridDim.x} * kThreads) {
    p.values[i] = 1.0f / sqrtf(p.values[i] / p.width + p.eps);
  }
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads) norm_projection_kernel(const NormProjection p) {
  constexpr int N = kColumns<T, T>;
  const int lane = static_cast<int>(threadIdx.x % kWarp), cols = static_cast<int>(p.cols);
  for (std::int64_t r = first_row(); r < p.rows; r += row_step()) {
    const T* const x = static_cast<const T*>(p.x) + r * cols;
    T* const y = static_cast<T*>(p.y) + r * cols;
    const float factor = p.rstd[r] * p.rstd[r] * p.sums[r] / p.width;
    for (int i = lane * N; i < cols; i += kWarp * N) {
      float along[N], out[N];
      read<kWhole>(x, i, cols, along);
      read<kWhole>(static_cast<const T*>(y), i, cols, out);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] -= factor * along[j];
      write<kWhole>(y, i, cols, out);
    }
  }
}

dim3 blocks_for(std::int64_t n, std::int64_t each) {
  return dim3(static_cast<unsigned>(std::min<std::int64_t>(0x7fffffff, ceil_div(n, each))));
}

}  // namespace

void row_products(const RowProducts& params, const Launch& where) {
  visit_float(params.dtype, "row_products", [&](auto t) {
    using T = decltype(t);
    constexpr int N = kColumns<T, T>;
    const bool whole = in_packs<N>(static_cast<const T*>(params.a), params.cols) &&
                       in_packs<N>(static_cast<const T*>(params.b), params.cols);
    launch(whole ? row_products_kernel<T, true> : row_products_kernel<T, false>,
           blocks_for(params.rows, kWarps), dim3(kThreads), 0, where, params);
  });
}

void inverse_roots(const InverseRoots& params, const Launch& where) {
  launch(inverse_roots_kernel, blocks_for(params.n, kThreads), dim3(kThreads), 0, where, params);
}

void norm_projection(const NormProjection& params, const Launch& where) {
  visit_float(params.dtype, "norm_projection", [&](auto t) {
    using T = decltype(t);
    constexpr int N = kColumns<T, T>;
    const bool whole = in_packs<N>(static_cast<const T*>(params.x), params.cols) &&
                       in_packs<N>(static_cast<const T*>(params.y), params.cols);
    launch(whole ? norm_projection_kernel<T, true> : norm_projection_kernel<T, false>,
           blocks_for(params.rows, kWarps), dim3(kThreads), 0, where, params);
  });
}

TESSERA_KERNEL_FILE(inverse_roots_kernel);

}  // namespace tessera::kernels::cuda
