#pragma once
/// What an optimizer step decides, kept where the gradients are: so no step waits until the host has read the
/// norm of its gradients. Kernels and optim share this layout; one instance lives in device memory for the
/// whole run.

#include <cstdint>

#include "tessera/base/dtype.hpp"

namespace tessera {

/// Learning rate and weight decay of one update.
struct UpdateRates {
  double lr = 0, weight_decay = 0;
};

struct UpdateState {
  double squares =
      0;  ///< sum of squares of all gradients, scaled as they are; taken and reset by begin_update
  double grad_norm = 0;  ///< of the true gradient, before clipping; not finite if the step was skipped
  double grad_factor =
      1;  ///< from gradients as they are to those the update takes: averaging, clipping, loss scale
  double lr = 0, weight_decay = 0;
  double correction1 = 1, correction2 = 1;  ///< 1 - beta^t of Adam
  double clip_factor = 1;
  std::int64_t updates = 0;  ///< made so far, this one included
  std::int32_t skip = 0;     ///< 1: the gradient was not finite, nothing may change

  /// Factor on the loss of the next forward pass (fp16); 1 without scaling.
  float loss_scale = 1.0f;
  std::int32_t good_steps = 0;  ///< finite steps since the scale last changed
  std::int32_t hysteresis = 0;  ///< non-finite steps the scale still tolerates
};

/// Dynamic loss scaling with Megatron's rules (--initial-loss-scale, --min-loss-scale, --loss-scale-window,
/// --hysteresis). growth_interval 0: the scale stays as it is.
struct LossScaleRule {
  float growth = 2.0f, backoff = 0.5f, smallest = 1.0f;
  std::int32_t growth_interval = 0, hysteresis = 2;

  TESSERA_INLINE void apply(UpdateState& state) const {
    if (growth_interval == 0) return;
    if (state.skip != 0) {
      state.good_steps = 0;
      if (--state.hysteresis > 0) return;
      const float lower = state.loss_scale * backoff;
      state.loss_scale = lower > smallest ? lower : smallest;
    } else if (++state.good_steps == growth_interval) {
      state.good_steps = 0;
      state.hysteresis = hysteresis;
      state.loss_scale *= growth;
    }
  }
};

}  // namespace tessera
