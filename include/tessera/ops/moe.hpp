#pragma once
/// Mixtures of experts: the router's choice, and rows of tokens in the order of their experts. A slot is one
/// of a token's choices, number token * topk + choice.

#include "tessera/device/exec_ctx.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// Which experts tokens go to.
struct Routing {
  Tensor weight;  ///< fp32 [tokens, topk]
  Tensor expert;  ///< int32 [tokens, topk], the greatest logit first
  Tensor lse;     ///< fp32 [tokens]: log-sum-exp of the logits
  Tensor z = {};  ///< fp32 [tokens]: lse^2 of counted tokens, 0 of others; undefined where it was not wanted
};
struct RouteOptions {
  std::int64_t topk = 1;
  bool normalized = true;  ///< a token's weights add up to 1: the softmax is over those chosen
};
/// logits [tokens, experts]. counted: int32 [tokens], 0 = padding; undefined = none is. Errors:
/// InvalidArgument unless 1 <= topk <= experts.
Routing route(const ExecCtx& ctx, const Tensor& logits, const RouteOptions& options, bool z = false,
              const Tensor& counted = {});

/// Of each sample: the sums over its counted tokens of probabilities, and of how often each expert was
/// chosen.
struct RouteSums {
  Tensor probability;  ///< fp32 [batch, experts]
  Tensor chosen;       ///< fp32 [batch, experts], whole numbers
};
/// logits [tokens, experts] of tokens [seq, batch].
RouteSums route_sums(const ExecCtx& ctx, const Tensor& logits, const Routing& routing, std::int64_t batch,
                     const Tensor& counted);

/// How evenly samples choose their experts, from sums over all their tokens (Fedus et al., "Switch
/// transformers", per sample).
struct Balance {
  Tensor value;   ///< fp32 [batch]; 1 for an even choice
  Tensor factor;  ///< fp32 [batch, experts]: derivative of the value by a probability
};
/// The value counts the probabilities given, which may be those of a part of the sample's tokens.
Balance balance(const ExecCtx& ctx, const RouteSums& sums, std::int64_t topk);

/// Gradients of what comes of a routing; each may be undefined, which is zero.
struct RoutingGrads {
  Tensor weight;   ///< fp32 [tokens, topk]
  Tensor balance;  ///< fp32 [batch], of Balance::value
  Tensor z;        ///< fp32 [tokens], of lse^2 of counted tokens
};
/// [tokens, experts] in the dtype of the logits. factor: Balance::factor, with grads.balance.
Tensor route_backward(const ExecCtx& ctx, const Tensor& logits, const Routing& routing,
                      const RouteOptions& options, const RoutingGrads& grads, const Tensor& factor,
                      const Tensor& counted);

/// Slots in the order of their experts, those of one expert in their own order.
struct SlotOrder {
  Tensor row;    ///< int32 [slots]: the place of a slot
  Tensor slot;   ///< int32 [slots]: the slot at a place
  Tensor token;  ///< int32 [slots]: its token
  Tensor count;  ///< int32 [experts]: slots of each
};
/// expert: int32 [tokens, topk].
SlotOrder sort_slots(const ExecCtx& ctx, const Tensor& expert, std::int64_t experts);

/// y[t] = the sum of weight[t, j] * x[row[t, j]] over j, in fp32: x [slots, cols] to [tokens, cols]. weight:
/// fp32 [tokens, topk]; undefined = all 1.
Tensor combine_slots(const ExecCtx& ctx, const Tensor& x, const Tensor& row, const Tensor& weight,
                     std::int64_t topk);

/// Sum of x * y of each row, fp32 [rows]; then multiplies the rows of both, [rows, cols], by weight [rows].
Tensor weigh_rows(const ExecCtx& ctx, const Tensor& x, const Tensor& y, const Tensor& weight);

}  // namespace tessera::ops
