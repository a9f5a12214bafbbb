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

/// RMSNorm of each query head and each key head of a packed qkv by itself, with a weight [head_dim] for all
/// queries and one for all keys. qkv is overwritten if this call is its last owner (std::move it in).
struct HeadNormOptions {
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  Parameter& query_weight;
  Parameter& key_weight;
  float eps = 1e-5f;
  bool zero_centered = false;  ///< multiplies by 1 + weight
};
Var head_norm(const ExecCtx& ctx, Var qkv, const HeadNormOptions& options);

Var add(const ExecCtx& ctx, const Var& a, const Var& b);
/// factor * x
Var scale(const ExecCtx& ctx, const Var& x, float factor);
/// cap * tanh(x / cap) of contiguous x [..., n]: [rows, n].
Var softcap(const ExecCtx& ctx, const Var& x, float cap);
/// x in another dtype; x itself where it has that. Of what has a recipe the result has one too.
Var cast(const ExecCtx& ctx, const Var& x, DType dtype);
Var dropout(const ExecCtx& ctx, const Var& x, const DropoutSpec& spec);

}  // namespace tessera
