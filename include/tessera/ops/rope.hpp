#pragma once
#include "tessera/base/config_words.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// cos and sin of position * frequency, [max_positions, rotary_dim / 2] fp32 each.
struct RopeTable {
  Tensor cos, sin;
  bool interleaved = false;
};

/// Angles of a model's positions.
struct RopeRule {
  double theta = 10000.0;
  RopeScaling scaling = {};
  std::int64_t trained = 0;  ///< dynamic: positions that the model was made for
  bool interleaved = false;
};
/// For which lengths of sequences a rule has other angles than for short ones: longer than this; 0 = for
/// none.
std::int64_t longest_usual(const RopeRule& rule);

/// Frequencies theta^(-2i/rotary_dim) (Su et al., "RoFormer"), stretched by the rule's scaling: position
/// interpolation (Chen et al. 2023), dynamic NTK, Llama-3's blend, YaRN (Peng et al.), LongRoPE (Ding et
/// al.); for sequences of `length` positions. Errors: InvalidArgument if rotary_dim is odd or not positive,
/// or longrope's lists have not one number for each pair.
RopeTable make_rope_table(const ExecCtx& ctx, std::int64_t max_positions, std::int64_t rotary_dim,
                          const RopeRule& rule, std::int64_t length = 0);

/// Rotates the first 2 * table.cos.size(1) features of each head of x in place. x: [seq, batch, heads, d]
/// view whose rows (seq, batch) are evenly spaced; positions: int32 [seq * batch] below max_positions.
/// `inverse` turns back.
void rope_in_place(const ExecCtx& ctx, const Tensor& x, const Tensor& positions, const RopeTable& table,
                   bool inverse);

}  // namespace tessera::ops
