#pragma once
/// Attention of a pass of generation over what the cache keeps.

#include "tessera/nn/forward.hpp"
#include "tessera/parallel/functions.hpp"

namespace tessera::nn {

/// Writes the pass's keys and values into the pages of layer `layer`, and attends to all that are there.
/// `qkv`: [seq, batch, width] as self_attention reads it. `bias`: by distance, [2 capacity - 1, heads], or
/// undefined. Returns [seq, batch, heads * head_dim].
Tensor cached_self_attention(const Forward& forward, std::int64_t layer, const Tensor& qkv,
                             const SelfAttentionOptions& options, const Tensor& bias = {});

/// `kv`: [encoder's positions, batch, width] as cross_attention reads it, which goes into the cache;
/// undefined in passes whose encoder rests. Returns [seq, batch, heads * head_dim].
Tensor cached_cross_attention(const Forward& forward, std::int64_t layer, const Tensor& q, const Tensor& kv,
                              const SelfAttentionOptions& options);

}  // namespace tessera::nn
