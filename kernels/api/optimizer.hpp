#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/update_state.hpp"

namespace tessera::kernels {

/// Decides one update from state->squares: norm, skip, clip factor, loss scale, this update's number and
/// rates.
struct BeginUpdate {
  UpdateState* state = nullptr;
  double grad_scale = 1;  ///< factor the caller owes the gradients (averaging); the loss scale comes on top
  double clip_grad = 0;   ///< largest norm; 0 = no clipping
  double beta1 = 0, beta2 = 0;
  LossScaleRule loss_scale = {};
  /// Rates of the updates numbered base + 1, base + 2, ... (updates before them may yet turn out to be
  /// skipped). What is beyond the last gets the last.
  static constexpr int kRates = 4;
  std::int64_t base = 0;
  UpdateRates rates[kRates] = {};
  int num_rates = 1;

  /// The whole arithmetic, for both devices: one thread runs it.
  TESSERA_INLINE void run() const {
    UpdateState& s = *state;
    const double scale = grad_scale / static_cast<double>(s.loss_scale);
    s.grad_norm = std::sqrt(s.squares) * (scale < 0 ? -scale : scale);
    s.squares = 0;
    s.skip = s.grad_norm - s.grad_norm == 0.0 ? 0 : 1;  // inf - inf and nan - nan are not 0
    if (s.skip == 0) {
      const double clip = clip_grad > 0 ? clip_grad / (s.grad_norm + 1e-6) : 1.0;
      s.clip_factor = clip < 1.0 ? clip : 1.0;
      s.grad_factor = scale * s.clip_factor;
      std::int64_t rate = s.updates - base;
      rate = rate < 0 ? 0 : rate < num_rates ? rate : num_rates - 1;
      s.lr = rates[rate].lr;
      s.weight_decay = rates[rate].weight_decay;
      ++s.updates;
      s.correction1 = 1.0 - std::pow(beta1, static_cast<double>(s.updates));
      s.correction2 = 1.0 - std::pow(beta2, static_cast<double>(s.updates));
    }
    loss_scale.apply(s);
  }
};

/// One Adam(W) update of n consecutive elements in one pass (Loshchilov & Hutter, "Decoupled weight decay").
/// g = grad * state.grad_factor (+ decay * main if not decoupled); m, v as usual;
/// main -= lr * (m / correction1) / (sqrt(v / correction2) + eps), after main *= 1 - lr * decay if
/// decoupled. lr = state.lr * lr_factor, decay = state.weight_decay * decay_factor. Nothing changes if
/// state.skip.
struct Adam {
  std::int64_t n = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  ///< double: 1 - 0.999f is not 0.001f
  double lr_factor = 1, decay_factor = 1;
  bool decoupled = true;
  const UpdateState* state = nullptr;
  const float* grad = nullptr;  ///< [n]
  float* main = nullptr;        ///< [n] fp32 weights
  float* m = nullptr;           ///< [n]
  float* v = nullptr;           ///< [n]
  void* model = nullptr;        ///< [n] compute copy to refresh, or null
  DType model_dtype = DType::bf16;
};

/// What Adam's inner loop needs, from the state.
struct AdamFactors {
  float grad, decay, l2, blend1, beta2, blend2, step, root, eps;

  TESSERA_INLINE static AdamFactors of(const Adam& p) {
    const UpdateState& s = *p.state;
    const double lr = s.lr * p.lr_factor, decay = s.weight_decay * p.decay_factor;
    return {static_cast<float>(s.grad_factor),
            p.decoupled ? static_cast<float>(1.0 - lr * decay) : 1.0f,
            p.decoupled ? 0.0f : static_cast<float>(decay),
            static_cast<float>(1.0 - p.beta1),
            static_cast<float>(p.beta2),
            static_cast<float>(1.0 - p.beta2),
            static_cast<float>(lr / s.correction1),
            static_cast<float>(1.0 / std::sqrt(s.correction2)),
            static_cast<float>(p.eps)};
  }
};

/// SGD with momentum: g = grad * state.grad_factor + decay * main; momentum = mu momentum + g; main -= lr *
/// momentum (or lr * (g + mu momentum) if nesterov). lr, decay and skip as for Adam.
struct Sgd {
  std::int64_t n = 0;
  double lr_factor = 1, decay_factor = 1;
  float momentum = 0;
  bool nesterov = false;
  const UpdateState* state = nullptr;
  const float* grad = nullptr;
  float* main = nullptr;
  float* buffer = nullptr;  ///< [n] momentum, null iff momentum is 0
  void* model = nullptr;
  DType model_dtype = DType::bf16;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(begin_update, BeginUpdate)
TESSERA_DECLARE_KERNEL(adam, Adam)
TESSERA_DECLARE_KERNEL(sgd, Sgd)
