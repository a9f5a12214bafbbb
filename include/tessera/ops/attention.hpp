#pragma once
#include "tessera/base/cache_page.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// Query i sees key j iff: not causal or j <= i + query_offset; no window or j > i + query_offset - window;
/// key_begin[b] <= j < key_end[b]; both are of
/// one document. A query that sees nothing gives zeros.
struct AttentionOptions {
  float scale = 0.0f;  ///< 0 = 1 / sqrt(head_dim)
  bool causal = true;
  std::int64_t query_offset = 0;  ///< position of query 0 among the keys (KV cache, context ranks)
  std::int64_t window = 0;        ///< 0 = none
  float softcap = 0.0f;  ///< c: scores become c tanh(score / c) (Gemma 2); 0 = they stay; not with ALiBi
  Tensor alibi_slopes;   ///< [heads] fp32 or undefined (Press et al., "Train short, test long")
  /// A bias by distance, [seq_q + seq_k - 1, heads] fp32 or undefined: query i and key j get row i - j +
  /// seq_k
  /// - 1. Without query_offset, ALiBi and softcap.
  Tensor bias;
  /// Where keys lie in the pages of a cache: [batch, entries] int32 or undefined. k and v are pools then,
  /// [pages, kv_heads, kCachePage, d], and key j of sample b is row j % kCachePage of page pages[b, j /
  /// kCachePage], for the first `keys` of them. Forward alone.
  Tensor pages;
  std::int64_t keys = 0;
  Tensor key_begin, key_end;  ///< [batch] int32 or undefined: each sample's range of real tokens
  Tensor document;       ///< [batch, seq_k] int32 or undefined: non-decreasing document numbers (packing)
  float dropout = 0.0f;  ///< on the probabilities
  RngKey dropout_key;
  std::int64_t sample0 = 0;     ///< global number of sample 0
  std::int64_t seq_length = 0;  ///< positions of a whole sample; 0 = seq_k
  /// Dropout is keyed by the global head: number of query head 0 and how many there are in all. 0 heads in
  /// all = these are all.
  std::int64_t head0 = 0, total_heads = 0;
};

struct AttentionResult {
  Tensor o;    ///< [seq_q, batch, heads, head_dim], contiguous
  Tensor lse;  ///< [batch, heads, seq_q] fp32
};

/// q [seq_q, batch, heads, d], k and v [seq_k, batch, kv_heads, d] (or pages): views with contiguous d. Never
/// holds a matrix of scores (Dao, "FlashAttention-2"). `into`: memory for the result's o; undefined = new.
/// Errors: InvalidArgument on shapes, dtypes, heads not a multiple of kv_heads.
AttentionResult attention(const ExecCtx& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                          const AttentionOptions& options, const Tensor& into = {});

/// Writes dq, dk, dv (views shaped like q, k, v; overwritten).
struct AttentionGrads {
  Tensor dq, dk, dv;
  Tensor dbias = {};  ///< where there is a bias; like it
};
void attention_backward(const ExecCtx& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionResult& saved, const Tensor& d_o, const AttentionOptions& options,
                        const AttentionGrads& grads);

}  // namespace tessera::ops
