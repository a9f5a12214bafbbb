/// Values from nothing: zeros, constants, normal variates (the CPU's, bit for bit).
// As kernels/api/normal.hpp asks, where this file is compiled for the host.
#if !defined(__CUDACC__) && defined(__clang__)
#pragma clang fp contract(off)
#elif !defined(__CUDACC__) && defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "kernels/api/elementwise.hpp"
#include "kernels/api/normal.hpp"
#include "kernels/cuda/elementwise.cuh"

namespace tessera::kernels::cuda {
namespace {

struct FillConstantOp {
  static constexpr int kUnroll = 4;
  template <int N>
  using Values = PackOf<N>;
  float value;
  float* x;

  template <int N>
  __device__ void load(std::int64_t, Values<N>& v) const {
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] = value;
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
    cuda::store(x + i, v.x);
  }
};

/// A thread makes one block of the stream: four variates, fewer at the ends of a row. `groups` of them cover
/// a row wherever it begins.
__global__ void __launch_bounds__(kElementwiseThreads) fill_normal_kernel(FillNormal p, std::int64_t groups) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kElementwiseThreads + threadIdx.x;
  const RowCol at = row_col(i, groups);
  if (at.row >= p.rows) return;
  const std::int64_t first = (p.row0 + at.row) * p.global_cols + p.col0;  // element of the row's first column
  const std::int64_t block = first / 4 + at.col;
  const PhiloxBlock words = random_block(p.key, static_cast<std::uint64_t>(block));
  const NormalPair low = normals(words.word[0], words.word[1]);
  const NormalPair high = normals(words.word[2], words.word[3]);
  const Exact z[4] = {low.first, low.second, high.first, high.second};
  float* row = p.out + at.row * p.cols;
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
    const std::int64_t col = block * 4 + lane - first;
    const Exact value = static_cast<double>(p.mean) + static_cast<double>(p.std) * z[lane];
    if (col >= 0 && col < p.cols) row[col] = static_cast<float>(value.value);
  }
}

}  // namespace

void fill_zero(const FillZero& params, const Launch& launch) {
  if (params.bytes == 0) return;
  check(cudaMemsetAsync(params.x, 0, static_cast<std::size_t>(params.bytes),
                        static_cast<cudaStream_t>(launch.stream)),
        "cudaMemsetAsync");
}

void fill_constant(const FillConstant& params, const Launch& launch) {
  const FillConstantOp op{params.value, params.x};
  if (is_aligned(params.x, 16)) {
    each_pack<kPack<float>>(op, params.n, launch);
  } else {
    each_pack<1>(op, params.n, launch);
  }
}

void fill_normal(const FillNormal& params, const Launch& where) {
  const std::int64_t groups = (params.cols + 3) / 4 + 1;
  const std::int64_t blocks =
      params.cols == 0 ? 0 : ceil_div(params.rows * groups, std::int64_t{kElementwiseThreads});
  launch(fill_normal_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseThreads), 0, where, params,
         groups);
}

TESSERA_KERNEL_FILE(fill_normal_kernel);

}  // namespace tessera::kernels::cuda
