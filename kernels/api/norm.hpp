#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels {

enum class NormKind : std::uint8_t { layer, rms };

/// Weights of norms are fp32 whatever the compute dtype: there are few, and rounding one rounds every
/// activation.
///
/// residual_out = residual + dropout(branch);  y = norm(residual_out) * weight + bias, statistics in fp32.
struct AddNormForward {
  std::int64_t rows = 0, cols = 0;
  NormKind kind = NormKind::layer;
  float eps = 1e-5f;
  DType residual_dtype = DType::f32;  ///< of residual, residual_out
  DType dtype = DType::f32;           ///< of branch and y
  const void* residual = nullptr;     ///< [rows, cols]
  const void* branch = nullptr;       ///< [rows, cols] or null: nothing is added
  DropoutSpec dropout = {};           ///< on branch
  const float* weight = nullptr;      ///< [cols]
  const float* bias = nullptr;        ///< [cols] or null
  void* residual_out =
      nullptr;            ///< [rows, cols]; null iff branch is null; may be the same memory as residual
  void* y = nullptr;      ///< [rows, cols]
  float* mean = nullptr;  ///< [rows]; null for rms
  float* rstd = nullptr;  ///< [rows]
  /// mean and rstd are those of `residual` already: only y is written, bit for bit as it was then. No branch.
  bool known_statistics = false;
};

/// Backward of AddNormForward. With g = dresidual + d norm(residual_out)/d residual_out . dy:
/// dresidual_in = g, dbranch = dropout mask/(1-p) * g.
struct AddNormBackward {
  std::int64_t rows = 0, cols = 0;
  NormKind kind = NormKind::layer;
  DType residual_dtype = DType::f32;  ///< of residual_out, dresidual, dresidual_in
  DType dtype = DType::f32;           ///< of dy, dbranch
  const void* residual_out =
      nullptr;                  ///< [rows, cols] as saved by forward (residual itself if there was no branch)
  const float* mean = nullptr;  ///< [rows]; null for rms
  const float* rstd = nullptr;  ///< [rows]
  const float* weight = nullptr;    ///< [cols]
  const void* dy = nullptr;         ///< [rows, cols]
  const void* dresidual = nullptr;  ///< [rows, cols] gradient of residual_out from above, or null = 0
  void* dresidual_in = nullptr;     ///< [rows, cols]; may be the same memory as dresidual
  void* dbranch = nullptr;          ///< [rows, cols] or null (no branch, or it equals dresidual_in)
  DropoutSpec dropout = {};         ///< as in forward; applied to dbranch
};

/// dweight = beta dweight + sum over rows of dy * xhat; dbias likewise with sum of dy. The order of summation
/// does not depend on the number of threads.
struct NormWeightGrad {
  std::int64_t rows = 0, cols = 0;
  NormKind kind = NormKind::layer;
  DType residual_dtype = DType::f32;
  DType dtype = DType::f32;
  const void* residual_out = nullptr;  ///< [rows, cols]
  const float* mean = nullptr;         ///< [rows]; null for rms
  const float* rstd = nullptr;         ///< [rows]
  const void* dy = nullptr;            ///< [rows, cols]
  float* dweight = nullptr;            ///< [cols]
  float* dbias = nullptr;              ///< [cols] or null
  float beta = 0.0f;                   ///< 0 or 1
  float* scratch = nullptr;            ///< [kNormGradParts, 2, cols]
};
inline constexpr int kNormGradParts = 32;

/// Both gradients in one pass over residual_out and dy. On the CPU they have the bits of add_norm_backward
/// and norm_weight_grad. On CUDA rows may be added in another order, which depends on the sizes and the GPU's
/// number of multiprocessors alone.
struct AddNormGradients {
  AddNormBackward input;
  NormWeightGrad weight;  ///< of the same norm; its scratch is [norm_gradient_parts(rows, cols), 2, cols]
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(add_norm_forward, AddNormForward)
TESSERA_DECLARE_KERNEL(add_norm_backward, AddNormBackward)
TESSERA_DECLARE_KERNEL(norm_weight_grad, NormWeightGrad)
TESSERA_DECLARE_KERNEL(add_norm_gradients, AddNormGradients)
namespace tessera::kernels::cpu {
int norm_gradient_parts(std::int64_t rows, std::int64_t cols);
}
namespace tessera::kernels::cuda {
int norm_gradient_parts(std::int64_t rows, std::int64_t cols);  ///< on the current device
}
