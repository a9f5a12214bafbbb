#pragma once
/// Tokens of texts: drawn on the device, and their keys and values kept.

#include "tessera/base/cache_page.hpp"
#include "tessera/base/sampling.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// Where n texts stand, on a CUDA device. Bits: [n, ceil(vocab / 32)] int32, bit t of a row for token t.
struct SamplingState {
  Tensor rows;       ///< n SamplingRow, as [n, sizeof / 4] int32
  Tensor seen;       ///< bits of the tokens that a text has; undefined where no row has a repetition penalty
  Tensor stops;      ///< bits of the tokens that end it; undefined where no row has a min_new_tokens
  Tensor tokens;     ///< [n] int32: the last token of each
  Tensor positions;  ///< [n] int32: its position
  Tensor lengths;    ///< [n] int32: positions that the cache then has
  Tensor drawn;      ///< n DrawnToken, as [n, 3] int32
  bool greedy = false;  ///< every row has top_k 1
};

/// Draws the next token of each row of `logits` [n, vocab] and moves the state on to it. What cannot be drawn
/// is said in `drawn`. With a random number of 53 bits the sums of probabilities are right to about 1e-9.
/// Errors: InvalidArgument on another device than CUDA.
void sample_tokens(const ExecCtx& ctx, const Tensor& logits, const SamplingState& state);

/// Where new keys and values of n texts go.
struct CachePlace {
  Tensor key, value;    ///< pools of pages, [pages, kv_heads, kCachePage, head_dim]
  Tensor pages;         ///< [n, entries] int32: entry i of a text is its page of positions [64 i, 64 i + 64)
  Tensor lengths = {};  ///< [n] int32: positions from there on are not written; undefined = all are
  std::int64_t first = -1;  ///< position of the first; below 0: one of each text, the last of its length
  std::int64_t window = 0;
};

/// Writes the keys and values [positions, n, kv_heads, head_dim] of a pass into the pages of their texts.
/// With a window above 0, for single positions, returns where the keys begin that each text's query sees, [n]
/// int32.
Tensor append_to_cache(const ExecCtx& ctx, const Tensor& key, const Tensor& value, const CachePlace& place);

}  // namespace tessera::ops
