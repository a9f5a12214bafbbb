#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/cache_page.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels {

/// Element strides of a [seq, batch, head, head_dim] operand; head_dim is contiguous.
struct HeadStrides {
  std::int64_t seq = 0, batch = 0, head = 0;
};

/// What forward and backward of one attention call share. Query head h reads KV head h / (heads / kv_heads).
/// Query i (position i + query_offset) sees key j iff all hold: not causal or j <= i + query_offset;
/// no window or j > i + query_offset - window; key_begin[b] <= j < key_end[b]; document[b, i + query_offset]
/// == document[b, j]. A query that sees no key gives zeros (lse = -inf) and contributes no gradient.
struct AttentionShape {
  std::int64_t batch = 0, seq_q = 0, seq_k = 0;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
  DType dtype = DType::f32;  ///< of q, k, v, o and their gradients; scores and sums in fp32
  HeadStrides q_stride, k_stride, v_stride, o_stride;
  /// Where keys and values lie in pages of kCachePage rows (forward alone), [batch, page_entries]: key j of
  /// sample b is row j % kCachePage of page pages[b, j / kCachePage]; the strides are those within a page,
  /// `batch` of k and v is not used. Entries for keys from key_end on may be anything.
  const std::int32_t* pages = nullptr;
  std::int64_t page_entries = 0;
  std::int64_t k_page = 0, v_page = 0;  ///< elements from one page to the next
  float scale = 1.0f;                   ///< scores = scale * q.k + slope * (j - (i + query_offset)) + bias
  bool causal = true;
  std::int64_t query_offset = 0;        ///< > 0 when earlier keys come from a KV cache
  std::int64_t window = 0;              ///< keys a query sees at most, the last up to its position; 0 = all
  float softcap = 0.0f;                 ///< scores become c tanh(score / c), not with ALiBi; 0 = they stay
  const float* alibi_slopes = nullptr;  ///< [heads] or null
  /// A bias by distance, [seq_q + seq_k - 1, heads] or null: the score of query i and key j gets row i - j +
  /// seq_k - 1. Without a query_offset, ALiBi and softcap.
  const float* bias = nullptr;
  const std::int32_t* key_begin = nullptr;  ///< [batch] or null = 0
  const std::int32_t* key_end = nullptr;    ///< [batch] or null = seq_k
  const std::int32_t* document = nullptr;   ///< [batch, seq_k], non-decreasing along a sample, or null
  /// Dropout on the probabilities: element (row = ((sample0 + b) * total_heads + head0 + h) * seq_length + i
  /// + query_offset, feature j) of a matrix with seq_length features, numbered as in DropoutSpec.
  RngKey dropout_key;
  float dropout = 0.0f;
  std::int64_t sample0 = 0, head0 = 0, total_heads = 0, seq_length = 0;
  bool fast_only = false;  ///< on CUDA: DeviceError, saying why, where no fast kernel computes it
  /// The same call gives the same bits. Without: on CUDA backward may add up dQ in any order, which is
  /// faster.
  bool deterministic = true;
};

struct AttentionForward {
  AttentionShape shape;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* o = nullptr;
  float* lse =
      nullptr;  ///< [batch, heads, seq_q] log-sum-exp of the scores of each row; may be null (inference)
  void* workspace = nullptr;
};

struct AttentionBackward {
  AttentionShape shape;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* o = nullptr;
  const float* lse = nullptr;  ///< [batch, heads, seq_q]
  const void* d_o = nullptr;   ///< strides of o
  void* dq = nullptr;          ///< strides of q; overwritten
  void* dk = nullptr;          ///< strides of k; overwritten (summed over the query heads of a group)
  void* dv = nullptr;          ///< strides of v; overwritten
  void* workspace = nullptr;
  float* dbias = nullptr;  ///< like shape.bias, where there is one; overwritten, summed up in a fixed order
};

namespace cpu {
/// Bytes of scratch for forward / backward with `threads` threads.
std::size_t attention_forward_workspace(const AttentionShape& shape, int threads);
std::size_t attention_backward_workspace(const AttentionShape& shape, int threads);
}  // namespace cpu
namespace cuda {
std::size_t attention_forward_workspace(const AttentionShape& shape, int threads);
std::size_t attention_backward_workspace(const AttentionShape& shape, int threads);
}  // namespace cuda

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(attention_forward, AttentionForward)
TESSERA_DECLARE_KERNEL(attention_backward, AttentionBackward)
