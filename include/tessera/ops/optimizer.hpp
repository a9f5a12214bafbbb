#pragma once
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// Coefficients of one update. `step` counts from 1.
struct AdamOptions {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = true;  ///< AdamW; false adds the decay to the gradient
  std::int64_t step = 1;
  double grad_scale = 1;
};
struct SgdOptions {
  double lr = 0, momentum = 0, weight_decay = 0;
  bool nesterov = false;
  double grad_scale = 1;
};

/// One pass over a flat range: fp32 grad, main, m, v of equal length; `model` (bf16 copy to refresh) may be
/// undefined.
void adam(const ExecCtx& ctx, const Tensor& grad, const Tensor& main, const Tensor& m, const Tensor& v,
          const Tensor& model, const AdamOptions& options);
/// `buffer` holds the momentum; undefined iff momentum is 0.
void sgd(const ExecCtx& ctx, const Tensor& grad, const Tensor& main, const Tensor& buffer,
         const Tensor& model, const SgdOptions& options);

}  // namespace tessera::ops
