#pragma once
/// The differentiable operations models are made of. Each takes Vars and Parameters, records itself if one of
/// its Vars is on a tape, and otherwise just computes.

#include <optional>

#include "tessera/autograd/tape.hpp"
#include "tessera/ops/activation.hpp"
#include "tessera/ops/attention.hpp"
#include "tessera/ops/norm.hpp"
#include "tessera/ops/rope.hpp"

namespace tessera {

/// y = x weight^T + bias; bias may be null. row_padding as in ops::linear.
Var linear(const ExecCtx& ctx, const Var& x, Parameter& weight, Parameter* bias,
           std::int64_t row_padding = 1);

/// A linear's result, and an activation of it for activated_linear, which finds its gradient from `pre`: y
/// itself is on no tape.
struct LinearActivation {
  Var pre;
  Tensor y;
};
/// pre = linear(x), y = activation(pre); see ops::linear_with_activation. Without a tape no backward needs
/// pre: it is undefined.
LinearActivation linear_with_activation(const ExecCtx& ctx, const Var& x, Parameter& weight, Parameter* bias,
                                        ops::ActivationKind kind);

struct ResidualNorm {
  Var residual;  ///< residual + dropout(branch)
  Var y;         ///< its norm
};
/// The step between two blocks: adds the branch (may be empty) to the residual stream and normalises the sum.
/// forget: y has a recipe, so that linears keep none of it; they compute it again from the residual and its
/// statistics, which this Function keeps anyway (selective recomputation).
ResidualNorm add_norm(const ExecCtx& ctx, const Var& residual, const Var& branch, Parameter& weight,
                      Parameter* bias, const ops::NormOptions& options, const DropoutSpec& dropout = {},
                      bool forget = false);

Var activation(const ExecCtx& ctx, const Var& x, ops::ActivationKind kind);
inline Var swiglu(const ExecCtx& ctx, const Var& gate_up) {
  return activation(ctx, gate_up, ops::ActivationKind::swiglu);
}

/// linear(activation(x)). The activated values are computed again for
/// the weight gradient instead of kept: they are as large as x, and one pass over them is little beside the
/// product. `activated`: these values, where they are there already (linear_with_activation).
Var activated_linear(const ExecCtx& ctx, const Var& x, ops::ActivationKind kind, Parameter& weight,
                     Parameter* bias, const Tensor& activated = {});

/// How a packed qkv [seq, batch, (heads + 2 kv_heads) * head_dim] (all q heads, all k heads, all v heads) is
/// read.
struct SelfAttentionOptions {
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  ops::AttentionOptions attention;
  const ops::RopeTable* rope = nullptr;  ///< rotate q and k first; null = not
  Tensor positions;                      ///< [seq * batch] int32, with rope
};
/// Attention of a sequence over itself: [seq, batch, heads * head_dim]. qkv is rotated in place if this call
/// is its last owner (std::move it in). `bias`: AttentionOptions::bias, which the options leave out; may be
/// empty.
Var self_attention(const ExecCtx& ctx, Var qkv, const SelfAttentionOptions& options, const Var& bias = {});
/// Attention of a sequence, q [seq_q, batch, heads * head_dim], over another, kv [seq_k, batch, 2 kv_heads *
/// head_dim] (all k heads, all v heads): like q. Without rope.
Var cross_attention(const ExecCtx& ctx, const Var& q, const Var& kv, const SelfAttentionOptions& options);

Var add(const ExecCtx& ctx, const Var& a, const Var& b);
/// factor * x
Var scale(const ExecCtx& ctx, const Var& x, float factor);
/// x in another dtype; x itself where it has that. Of what has a recipe the result has one too.
Var cast(const ExecCtx& ctx, const Var& x, DType dtype);
Var dropout(const ExecCtx& ctx, const Var& x, const DropoutSpec& spec);

}  // namespace tessera
