#include "kernels/cuda/gemm_finish.hpp"

#include <algorithm>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/gelu.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// The bias is small and stays in cache: one load an element.
__device__ float bias_at(const GemmFinish& p, std::int64_t column) {
  switch (p.bias_dtype) {
    case DType::bf16:
      return to_float(static_cast<const bfloat16*>(p.bias)[column]);
    case DType::f16:
      return to_float(static_cast<const float16*>(p.bias)[column]);
    default:
      return static_cast<const float*>(p.bias)[column];
  }
}

template <typename T>
__device__ float gelu(float x, Epilogue kind) {
  return kind == Epilogue::gelu_tanh ? GeluTanh<T>::value(x) : GeluErf<T>::value(x);
}
template <typename T>
__device__ float gelu_slope(float x, Epilogue kind) {
  return kind == Epilogue::dgelu_tanh ? GeluTanh<T>::slope(x) : GeluErf<T>::slope(x);
}

/// N neighbours of a row a thread and turn.
template <typename T, int N>
__global__ void finish_kernel(GemmFinish p) {
  const std::int64_t groups = p.n / N, all = p.m * groups;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < all;
       i += step) {
    const std::int64_t row = i / groups, column = (i - row * groups) * N, at = row * p.ldc + column;
    float x[N] = {};
    if (!p.clear) load(static_cast<const T*>(p.product) + at, x);
    if (p.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] += bias_at(p, column + j);
    }
    if (is_gradient(p.epilogue)) {
      float pre[N];
      load(static_cast<const T*>(p.pre) + at, pre);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] *= gelu_slope<T>(pre[j], p.epilogue);
    } else if (p.epilogue != Epilogue::none) {
      if (p.pre != nullptr) store(static_cast<T*>(p.pre) + at, x);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = gelu<T>(x[j], p.epilogue);
    }
    store(static_cast<T*>(p.c) + at, x);
  }
}

template <typename T, int N>
void start(const GemmFinish& p, const Launch& where) {
  const std::int64_t blocks = ceil_div(p.m * (p.n / N), std::int64_t{kThreads});
  const std::int64_t most = std::int64_t{32} * multiprocessors();
  launch(&finish_kernel<T, N>, dim3(static_cast<unsigned>(std::min(blocks, most))), dim3(kThreads), 0, where,
         p);
}

}  // namespace

void gemm_finish(const GemmFinish& p, const Launch& where) {
  visit_float(p.c_dtype, "result of a product", [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kPack<T>;
    const bool packs = p.n % N == 0 && p.ldc % N == 0 && is_aligned(p.product, 16) && is_aligned(p.c, 16) &&
                       is_aligned(p.pre, 16);
    packs ? start<T, N>(p, where) : start<T, 1>(p, where);
  });
}

TESSERA_KERNEL_FILE(finish_kernel<float, 1>);

}  // namespace tessera::kernels::cuda
