#pragma once
#include <span>

#include "tessera/base/update_state.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// Memory for one UpdateState, with this first value: u8 [sizeof(UpdateState)].
Tensor make_update_state(const ExecCtx& ctx, const UpdateState& first);
/// The sum of squares in it, f64 [1]: where the gradients' squares are added up before begin_update.
Tensor squares_of(const Tensor& state);
/// The loss scale in it, f32 [1].
Tensor loss_scale_of(const Tensor& state);

struct BeginUpdateOptions {
  double grad_scale = 1;  ///< what the gradients must yet be multiplied by
  double clip_grad = 0;   ///< 0 = no clipping
  double beta1 = 0, beta2 = 0;
  LossScaleRule loss_scale = {};
  std::int64_t base = 0;                    ///< rates[i] are those of update base + 1 + i
  std::span<const UpdateRates> rates = {};  ///< at least one, at most kernels::BeginUpdate::kRates
};
/// Decides one update: norm, skip, clip factor, rates. See UpdateState.
void begin_update(const ExecCtx& ctx, const Tensor& state, const BeginUpdateOptions& options);

/// What differs between parameters. The rest comes from the state.
struct AdamOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double lr_factor = 1, decay_factor = 1;
  bool decoupled = true;  ///< AdamW; false adds the decay to the gradient
};
struct SgdOptions {
  double lr_factor = 1, decay_factor = 1;
  double momentum = 0;
  bool nesterov = false;
};

/// One pass over a flat range: fp32 grad, main, m, v of equal length; `model` (16-bit copy to refresh) may be
/// undefined.
void adam(const ExecCtx& ctx, const Tensor& state, const Tensor& grad, const Tensor& main, const Tensor& m,
          const Tensor& v, const Tensor& model, const AdamOptions& options);
/// `buffer` holds the momentum; undefined iff momentum is 0.
void sgd(const ExecCtx& ctx, const Tensor& state, const Tensor& grad, const Tensor& main,
         const Tensor& buffer, const Tensor& model, const SgdOptions& options);

}  // namespace tessera::ops
