#pragma once
/// How a packed qkv or kv is read.

#include <utility>

#include "tessera/autograd/functions.hpp"

namespace tessera::detail {

/// q, k and v as [seq, batch, heads, head_dim] views of a packed qkv.
struct Heads {
  Tensor q, k, v;
};

inline Tensor by_head(const Tensor& packed, std::int64_t heads, std::int64_t head_dim) {
  return packed.view({packed.size(0), packed.size(1), heads, head_dim});
}

inline Heads split_qkv(const Tensor& qkv, const SelfAttentionOptions& o) {
  const Tensor heads = by_head(qkv, o.heads + 2 * o.kv_heads, o.head_dim);
  return {heads.narrow(2, 0, o.heads), heads.narrow(2, o.heads, o.kv_heads),
          heads.narrow(2, o.heads + o.kv_heads, o.kv_heads)};
}

/// k and v likewise of a packed kv.
inline std::pair<Tensor, Tensor> split_kv(const Tensor& kv, const SelfAttentionOptions& o) {
  const Tensor heads = by_head(kv, 2 * o.kv_heads, o.head_dim);
  return {heads.narrow(2, 0, o.kv_heads), heads.narrow(2, o.kv_heads, o.kv_heads)};
}

/// Rotates queries and keys; theirs lie next to each other, so that one rotation serves both.
inline void rotate(const ExecCtx& ctx, const Tensor& qkv, const SelfAttentionOptions& o, bool inverse) {
  if (o.rope == nullptr) return;
  const Tensor heads = by_head(qkv, o.heads + 2 * o.kv_heads, o.head_dim);
  ops::rope_in_place(ctx, heads.narrow(2, 0, o.heads + o.kv_heads), o.positions, *o.rope, inverse);
}

/// The value of a packed qkv, rotated: in place if `qkv` is its last owner. Errors: InvalidArgument for
/// another shape.
Tensor take_rotated(const ExecCtx& ctx, Var& qkv, const SelfAttentionOptions& o);

}  // namespace tessera::detail
