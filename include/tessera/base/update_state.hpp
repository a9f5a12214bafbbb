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

/// Elements that an update treats alike: the group of each block of so many is looked up once.
inline constexpr std::int64_t kGroupBlock = 64;
/// Groups an optimizer may have, and the index of blocks that belong to none: an update leaves them alone.
inline constexpr int kMostGroups = 255;
inline constexpr std::uint8_t kNoGroup = 255;

/// How one group of parameters is updated.
struct GroupRule {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  ///< Adam; double: 1 - 0.999f is not 0.001f
  double momentum = 0;                            ///< SGD
  std::int64_t missed = 0;  ///< updates of UpdateState::updates that it had no part in: Adam counts its own
  /// Rates of the updates that may come next, in order: which of them does depends on how many of those
  /// before it turn out to be skipped.
  static constexpr int kRates = 4;
  UpdateRates rates[kRates] = {};
};

struct UpdateState {
  double squares =
      0;  ///< sum of squares of all gradients, scaled as they are; taken and reset by begin_update
  double grad_norm = 0;  ///< of the true gradient, before clipping; not finite if the step was skipped
  double grad_factor =
      1;  ///< from gradients as they are to those the update takes: averaging, clipping, loss scale
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
