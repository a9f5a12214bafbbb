#pragma once
#include "tessera/base/philox.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

struct NormOptions {
  bool rms = false;  ///< RMSNorm instead of LayerNorm
  float eps = 1e-5f;
  DType out = DType::f32;      ///< of y, and of the branch
  bool zero_centered = false;  ///< the factor is 1 + weight (Gemma)
};

/// Result of add_norm, and what its backward needs of it.
struct AddNorm {
  Tensor residual;  ///< [..., c] residual + dropout(branch), in the residual's dtype
  Tensor y;         ///< [..., c] normalised, in NormOptions::out
  Tensor mean;      ///< [rows] fp32; undefined for RMSNorm
  Tensor rstd;      ///< [rows] fp32
};

/// residual' = residual + dropout(branch); y = norm(residual') * weight + bias (LayerNorm: Ba et al. 2016;
/// RMSNorm: Zhang & Sennrich 2019). branch and bias may be undefined; without a branch residual' is
/// `residual` itself.
AddNorm add_norm(const ExecCtx& ctx, const Tensor& residual, const Tensor& branch, const Tensor& weight,
                 const Tensor& bias, const NormOptions& options, const DropoutSpec& dropout = {});

/// AddNorm::y once more, bit for bit, from the residual and the statistics that add_norm gave.
Tensor norm_again(const ExecCtx& ctx, const AddNorm& saved, const Tensor& weight, const Tensor& bias,
                  const NormOptions& options);

struct AddNormGrad {
  Tensor residual;  ///< gradient of `residual`
  Tensor branch;  ///< gradient of `branch`; undefined if there was none, the same tensor as `residual` where
                  ///< equal
};

/// dy and dresidual are the gradients of y and residual'; dresidual may be undefined (zero).
AddNormGrad add_norm_backward(const ExecCtx& ctx, const AddNorm& saved, const Tensor& weight,
                              const Tensor& dy, const Tensor& dresidual, bool has_branch,
                              const NormOptions& options, const DropoutSpec& dropout = {});

/// dweight = beta dweight + sum of dy * xhat, dbias likewise of dy (dbias may be undefined). fp32.
void norm_weight_grad(const ExecCtx& ctx, const AddNorm& saved, const Tensor& dy, const Tensor& dweight,
                      const Tensor& dbias, float beta, const NormOptions& options);

/// Where the parameters' gradients of a norm go, as norm_weight_grad takes them.
struct NormWeightSums {
  Tensor dweight;  ///< [c] fp32
  Tensor dbias;    ///< [c] fp32, or undefined
  float beta = 0.0f;
};
/// add_norm_backward and norm_weight_grad in one pass over the activations. On the CPU with the same bits, on
/// CUDA to rounding: sums have a fixed order there too, but another one.
AddNormGrad add_norm_gradients(const ExecCtx& ctx, const AddNorm& saved, const Tensor& weight,
                               const Tensor& dy, const Tensor& dresidual, bool has_branch,
                               const NormWeightSums& sums, const NormOptions& options,
                               const DropoutSpec& dropout = {});

// An RMSNorm of rows whose features ranks share: what they add up is its sums.

/// Sums over the last dimension of a * b, fp32 [rows]: a and b of one shape and dtype.
Tensor row_products(const ExecCtx& ctx, const Tensor& a, const Tensor& b);
/// sums = 1 / sqrt(sums / width + eps): AddNorm::rstd from sums of squares over `width` features.
void inverse_roots(const ExecCtx& ctx, const Tensor& sums, std::int64_t width, float eps);
/// dx -= x rstd^2 sums / width, by rows: `sums` of dy * y over all features. With norm_again(dy) in dx this
/// is the gradient of x.
void norm_projection(const ExecCtx& ctx, const AddNorm& saved, const Tensor& sums, std::int64_t width,
                     const Tensor& dx);

}  // namespace tessera::ops
