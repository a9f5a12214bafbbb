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
  LossScaleRule loss_scale = {};
};
/// Decides one update: norm, skip, clip factor. See UpdateState.
void begin_update(const ExecCtx& ctx, const Tensor& state, const BeginUpdateOptions& options);

/// Memory for what an update reads of each of so many groups, written by update_groups: u8. Errors:
/// InvalidArgument unless 1 to kMostGroups.
Tensor make_group_factors(const ExecCtx& ctx, std::int64_t groups);
struct UpdateGroupsOptions {
  bool decoupled = true;               ///< AdamW; false adds the decay to the gradient
  std::int64_t base = 0;               ///< rates[i] of a rule are those of update base + 1 + i
  int num_rates = 1;                   ///< of each rule, at most GroupRule::kRates
  std::span<const GroupRule> rules{};  ///< one for each group
};
/// Works out what the update that was just begun does to each group. The rules are copied: the caller may
/// change them at once.
void update_groups(const ExecCtx& ctx, const Tensor& state, const Tensor& factors,
                   const UpdateGroupsOptions& options);

/// Which group each element of a flat range belongs to.
struct ElementGroups {
  Tensor factors;   ///< from make_group_factors
  Tensor of_block;  ///< u8 [n / kGroupBlock, rounded up]: group, or kNoGroup for what is left as it is
};

/// Splits fp32 main weights into `model`, bf16, which is rounded to nearest (ties away from zero), and `low`,
/// u16, the low 16 bits of each. Together they hold every bit; a NaN stays one.
void split_main(const ExecCtx& ctx, const Tensor& main, const Tensor& model, const Tensor& low);
/// The reverse: writes fp32 `main`.
void join_main(const ExecCtx& ctx, const Tensor& model, const Tensor& low, const Tensor& main);

/// What an update changes: fp32 `main` with `model`, a 16-bit copy to refresh, which may be undefined; or
/// `model` and `low` as split_main makes them, and `main` undefined.
struct MainWeights {
  Tensor main, model, low = {};
};

/// One pass over a flat range: weights and fp32 grad, m, v of equal length.
void adam(const ExecCtx& ctx, const Tensor& state, const ElementGroups& groups, const Tensor& grad,
          const MainWeights& weights, const Tensor& m, const Tensor& v);
/// `buffer` holds the momentum; it may be undefined if no group has any.
void sgd(const ExecCtx& ctx, const Tensor& state, const ElementGroups& groups, const Tensor& grad,
         const MainWeights& weights, const Tensor& buffer, bool nesterov);

}  // namespace tessera::ops
