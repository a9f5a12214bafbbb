#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/update_state.hpp"

namespace tessera::kernels {

/// Decides one update from state->squares: norm, skip, clip factor, loss scale, this update's number.
struct BeginUpdate {
  UpdateState* state = nullptr;
  double grad_scale = 1;  ///< factor the caller owes the gradients (averaging); the loss scale comes on top
  double clip_grad = 0;   ///< largest norm; 0 = no clipping
  LossScaleRule loss_scale = {};

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
      ++s.updates;
    }
    loss_scale.apply(s);
  }
};

/// What Adam's inner loop needs of a group: main = main * decay - step * m / (sqrt(v) * root + eps), and l2 *
/// main is added to the gradient.
struct AdamFactors {
  float decay, l2, blend1, beta2, blend2, step, root, eps;
};
/// The same of SGD.
struct SgdFactors {
  float lr, decay, momentum;
};
/// What an update reads of each group, written by update_groups.
struct alignas(16) GroupFactors {
  AdamFactors adam;
  SgdFactors sgd;
};

/// Works out the factors of some groups for the update that was just begun; nothing if it is skipped.
struct UpdateGroups {
  /// Groups of one launch: as many as fit into the 4 KiB of a CUDA kernel's parameters.
  static constexpr int kMost = 32;
  const UpdateState* state = nullptr;
  GroupFactors* factors = nullptr;  ///< [count]
  bool decoupled = true;            ///< AdamW; false adds the decay to the gradient
  std::int64_t base = 0;            ///< rates[i] of a rule are those of update base + 1 + i
  int num_rates = 1;                ///< what is beyond the last gets the last
  int count = 0;
  GroupRule rules[kMost] = {};

  TESSERA_INLINE void run(int group) const {
    if (state->skip != 0) return;
    const GroupRule& rule = rules[group];
    const auto updates = static_cast<double>(state->updates - rule.missed);
    std::int64_t rate = state->updates - 1 - base;
    rate = rate < 0 ? 0 : rate < num_rates ? rate : num_rates - 1;
    const double lr = rule.rates[rate].lr, decay = rule.rates[rate].weight_decay;
    const double correction1 = 1.0 - std::pow(rule.beta1, updates);
    const double correction2 = 1.0 - std::pow(rule.beta2, updates);
    factors[group] = {{decoupled ? static_cast<float>(1.0 - lr * decay) : 1.0f,
                       decoupled ? 0.0f : static_cast<float>(decay), static_cast<float>(1.0 - rule.beta1),
                       static_cast<float>(rule.beta2), static_cast<float>(1.0 - rule.beta2),
                       static_cast<float>(lr / correction1), static_cast<float>(1.0 / std::sqrt(correction2)),
                       static_cast<float>(rule.eps)},
                      {static_cast<float>(lr), static_cast<float>(decay), static_cast<float>(rule.momentum)}};
  }
};

static_assert(sizeof(UpdateGroups) <= 4096);

/// Which group each block of kGroupBlock elements belongs to, and what the update does to it.
struct GroupsOfElements {
  const GroupFactors* factors = nullptr;  ///< [count]
  int count = 0;
  const std::uint8_t* of_block = nullptr;  ///< [n / kGroupBlock, rounded up] index of factors, or kNoGroup
};

/// An fp32 main weight as the bf16 weight that kernels read and its own low 16 bits. The bf16 weight is the
/// main weight rounded to nearest, ties away from zero: so the low bits say which way it was rounded, and
/// joining gives back every bit. A NaN stays one, without its sign and payload.
struct SplitWeight {
  bfloat16 model;
  std::uint16_t low;

  static TESSERA_INLINE SplitWeight split(float main) {
    std::uint32_t word;
    __builtin_memcpy(&word, &main, sizeof word);
    if (main != main) word = 0x7fc00000u;
    SplitWeight parts;
    parts.low = static_cast<std::uint16_t>(word);
    parts.model.bits = static_cast<std::uint16_t>((word >> 16) + ((word >> 15) & 1u));
    return parts;
  }
  TESSERA_INLINE float join() const {
    const std::uint32_t upper = static_cast<std::uint32_t>(model.bits) - (low >> 15);
    const std::uint32_t word = (upper << 16) | low;
    float main;
    __builtin_memcpy(&main, &word, sizeof main);
    return main;
  }
};

/// Main weights into their two parts.
struct SplitMain {
  std::int64_t n = 0;
  const float* main = nullptr;   ///< [n]
  bfloat16* model = nullptr;     ///< [n]
  std::uint16_t* low = nullptr;  ///< [n]
};
/// The reverse.
struct JoinMain {
  std::int64_t n = 0;
  const bfloat16* model = nullptr;
  const std::uint16_t* low = nullptr;
  float* main = nullptr;
};

/// One Adam(W) update of n consecutive elements in one pass (Loshchilov & Hutter, "Decoupled weight decay").
/// g = grad * state.grad_factor (+ decay * main if not decoupled); m, v as usual;
/// main -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps), after main *= 1 - lr * decay if
/// decoupled; t = state.updates without those the group missed. Nothing changes if state.skip, nor where
/// there is no group. With `low` the main weights are split: `model` (bf16) and `low` are read and written,
/// and `main` is null.
struct Adam {
  std::int64_t n = 0;
  GroupsOfElements groups = {};
  const UpdateState* state = nullptr;
  const float* grad = nullptr;   ///< [n]
  float* main = nullptr;         ///< [n] fp32 weights
  float* m = nullptr;            ///< [n]
  float* v = nullptr;            ///< [n]
  std::uint16_t* low = nullptr;  ///< [n] of split main weights, or null
  void* model = nullptr;         ///< [n] compute copy to refresh, or null
  DType model_dtype = DType::bf16;
};

/// SGD with momentum: g = grad * state.grad_factor + decay * main; momentum = mu momentum + g; main -= lr *
/// momentum (or lr * (g + mu momentum) if nesterov). A group without momentum leaves the buffer as it is.
/// Skip, groups and split main weights as for Adam.
struct Sgd {
  std::int64_t n = 0;
  GroupsOfElements groups = {};
  bool nesterov = false;
  const UpdateState* state = nullptr;
  const float* grad = nullptr;
  float* main = nullptr;
  float* buffer = nullptr;  ///< [n] momentum; null: no group has any
  std::uint16_t* low = nullptr;
  void* model = nullptr;
  DType model_dtype = DType::bf16;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(begin_update, BeginUpdate)
TESSERA_DECLARE_KERNEL(update_groups, UpdateGroups)
TESSERA_DECLARE_KERNEL(split_main, SplitMain)
TESSERA_DECLARE_KERNEL(join_main, JoinMain)
TESSERA_DECLARE_KERNEL(adam, Adam)
TESSERA_DECLARE_KERNEL(sgd, Sgd)
