#pragma once
/// The pass over C for what a product's own epilogue cannot do.
#include <cstdint>

#include "kernels/api/gemm.hpp"
#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels::cuda {

/// x = product + bias; pre = x; C = activation(x). With the gradient of one C = x activation'(pre) instead.
/// Matrices are [m,n], row-major with leading dimension ldc.
struct GemmFinish {
  const void* product = nullptr;  ///< may be c or pre
  void* c = nullptr;
  const void* bias = nullptr;  ///< [n] or null
  void* pre = nullptr;         ///< or null, but read by a gradient; only written with an activation
  std::int64_t m = 0, n = 0, ldc = 0;
  DType c_dtype = DType::f32, bias_dtype = DType::f32;
  Epilogue epilogue = Epilogue::none;
  bool clear = false;  ///< the product counts as 0 and is not read
};
void gemm_finish(const GemmFinish& params, const Launch& launch);

}  // namespace tessera::kernels::cuda
