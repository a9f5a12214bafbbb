#pragma once
/// What lies between the matrix products of attention: masked softmax over rows of scores, and its gradient.
/// Scores arrive in units of log 2 (q.k * scale * log2(e), without position bias); masks, biases and dropout
/// are those of an AttentionShape. What no query sees is never read, only its zero is written.

#include <cstdint>

#include "kernels/api/attention.hpp"

namespace tessera::kernels::cuda {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

/// The keys [begin, end) one query sees; {0, 0} if none.
struct KeyRange {
  std::int32_t begin = 0, end = 0;
};

/// Writes ranges[batch, seq_q] on the device.
void key_ranges(const AttentionShape& shape, KeyRange* ranges, const Launch& launch);

/// Score matrices of the samples [batch0, batch0 + batch), KV heads [kv0, ...), query heads [member0, ...) of
/// each KV head's group and queries [row0, ...): [batch, kv, members, rows, row_stride] fp32 in memory,
/// against the keys [0, keys). No query of the block sees a key beyond.
struct ScoreBlock {
  std::int64_t batch0 = 0, batch = 0;
  std::int64_t kv0 = 0, kv = 0;
  std::int64_t member0 = 0, members = 0;
  std::int64_t row0 = 0, rows = 0;
  std::int64_t keys = 0;
  std::int64_t row_stride = 0;  ///< floats; a multiple of 8, not below `keys`

  TESSERA_INLINE std::int64_t matrices() const { return batch * kv * members; }
};

/// Turns the scores, 16-byte aligned, into probabilities of the shape's dtype, in place: row r of a matrix
/// starts where it started, so rows of 16-bit elements are 2 * row_stride elements apart. A dropped element
/// is 0, a kept one is not yet divided by 1 - dropout. A query that sees no key gets zeros.
struct SoftmaxForward {
  AttentionShape shape;
  ScoreBlock block;
  const KeyRange* ranges = nullptr;  ///< of key_ranges
  float* scores = nullptr;
  float* lse = nullptr;  ///< [batch, heads, seq_q] of the whole shape, natural logarithm; may be null
};
void softmax_forward(const SoftmaxForward& params, const Launch& launch);

/// Scores to the probabilities softmax_forward made of them, and the gradients of those (d_o v^T, same
/// layout, without the factor 1 / (1 - dropout)) to the gradients of the scores times 1 / scale; both in
/// place as above.
struct SoftmaxBackward {
  AttentionShape shape;
  ScoreBlock block;
  const KeyRange* ranges = nullptr;
  float* scores = nullptr;
  float* gradients = nullptr;
  const float* lse = nullptr;  ///< [batch, heads, seq_q]
  const void* o = nullptr;     ///< strides shape.o_stride
  const void* d_o = nullptr;   ///< strides shape.o_stride
};
void softmax_backward(const SoftmaxBackward& params, const Launch& launch);

/// Adds to dbias (as AttentionBackward::dbias) the gradients of a block's scores that softmax_backward left
/// in `gradients`, in a fixed order.
struct BiasGradient {
  AttentionShape shape;
  ScoreBlock block;
  const float* gradients = nullptr;
  float* dbias = nullptr;
};
void add_bias_gradient(const BiasGradient& params, const Launch& launch);

}  // namespace tessera::kernels::cuda
