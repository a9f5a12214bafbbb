#pragma once
#include "tessera/base/config_words.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// cos and sin of position * frequency, [max_positions, rotary_dim / 2] fp32 each.
struct RopeTable {
  Tensor cos, sin;
  bool interleaved = false;
};

/// Frequencies theta^(-2i/rotary_dim) (Su et al., "RoFormer"), with Llama-3's blend of scaled and unscaled
/// ones. Errors: InvalidArgument if rotary_dim is odd or not positive.
RopeTable make_rope_table(const ExecCtx& ctx, std::int64_t max_positions, std::int64_t rotary_dim,
                          double theta, const RopeScaling& scaling, bool interleaved);

/// Rotates the first 2 * table.cos.size(1) features of each head of x in place. x: [seq, batch, heads, d]
/// view whose rows (seq, batch) are evenly spaced; positions: int32 [seq * batch] below max_positions.
/// `inverse` turns back.
void rope_in_place(const ExecCtx& ctx, const Tensor& x, const Tensor& positions, const RopeTable& table,
                   bool inverse);

}  // namespace tessera::ops
