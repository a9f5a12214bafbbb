#pragma once
/// Attention by cuDNN, for the shapes it computes exactly as kernels/api/attention.hpp defines it. What it
/// gives (outputs and log-sum-exps) and what our own kernels give can be used in place of each other, pass by
/// pass.

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/api/attention.hpp"
#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {

namespace detail {

/// Whether the elements of a [seq, batch, head, head_dim] operand start at multiples of 16 bytes (2-byte
/// elements, a base that does) and can be numbered with 31 bits.
inline bool suits_cudnn(const HeadStrides& stride, std::int64_t seq, std::int64_t batch, std::int64_t heads,
                        std::int64_t head_dim) {
  const auto fits = [](std::int64_t size, std::int64_t step) {
    return size == 1 || (step > 0 && step % 8 == 0);
  };
  const std::int64_t last =
      (seq - 1) * stride.seq + (batch - 1) * stride.batch + (heads - 1) * stride.head + head_dim;
  return fits(seq, stride.seq) && fits(batch, stride.batch) && fits(heads, stride.head) &&
         last < (std::int64_t{1} << 31);
}

}  // namespace detail

/// Why cuDNN's attention does not mean the same as ours for this shape on a GPU of this compute capability
/// (major version); empty if it does. Not taken:
/// - key_begin, document: its padding mask has lengths only.
/// - key_end: a sample without any visible key must give zeros, and whether there is one is known on the
///   device only.
/// - ALiBi: its slopes are computed from the number of heads, ours are handed in.
/// - softcap: ours is applied to fp32 scores in units of log 2.
/// - dropout: its random bits are not those of the CPU.
/// - single queries and keys in pages: those of generation, which have ways of their own.
/// - under a causal mask a query_offset that leaves keys behind the last query.
inline std::string why_not_cudnn(const AttentionShape& s, int compute_capability) {
  if (compute_capability < 8) return "the GPU is older than compute capability 8.0";
  if (s.dtype != DType::bf16 && s.dtype != DType::f16) return "it is computed in fp32";
  if (s.dropout != 0.0f) return "dropout on attention";
  if (s.alibi_slopes != nullptr) return "ALiBi positions";
  if (s.softcap != 0.0f) return "capped scores";
  if (s.window > 0 && (!s.causal || s.seq_q > s.seq_k)) return "a window without a causal mask";
  if (s.bias != nullptr) return "a bias by distance";
  if (s.document != nullptr) return "several documents in a sample";
  if (s.key_begin != nullptr || s.key_end != nullptr) return "padded samples";
  if (s.seq_q <= 1 || (s.query_offset != 0 && s.pages != nullptr)) return "queries that follow cached keys";
  if (s.causal && s.query_offset != 0 && s.query_offset != s.seq_k - s.seq_q)
    return "keys behind the last query";
  if (s.batch <= 0 || s.seq_k <= 0 || s.kv_heads <= 0 || s.heads % s.kv_heads != 0)
    return "nothing to attend to";
  // Beyond 128 its backward exists for Hopper only.
  const std::int64_t widest = compute_capability == 9 ? 256 : 128;
  if (s.head_dim < 8 || s.head_dim % 8 != 0 || s.head_dim > widest)
    return tessera::detail::concat("heads of ", s.head_dim, ", not a multiple of 8 up to ", widest);
  if (!(detail::suits_cudnn(s.q_stride, s.seq_q, s.batch, s.heads, s.head_dim) &&
        detail::suits_cudnn(s.k_stride, s.seq_k, s.batch, s.kv_heads, s.head_dim) &&
        detail::suits_cudnn(s.v_stride, s.seq_k, s.batch, s.kv_heads, s.head_dim) &&
        detail::suits_cudnn(s.o_stride, s.seq_q, s.batch, s.heads, s.head_dim)))
    return "operands that are not aligned to 16 bytes, or too large";
  return "";
}

inline bool cudnn_means_the_same(const AttentionShape& s, int compute_capability) {
  return why_not_cudnn(s, compute_capability).empty();
}

inline std::string describe_attention(const AttentionShape& s) {
  return tessera::detail::concat(
      "attention of ", s.batch, " x ", s.heads, " heads (", s.kv_heads, " key-value) x ", s.head_dim, ", ",
      s.seq_q, " queries, ", s.seq_k, " keys, ", s.dtype,
      s.causal && s.query_offset != 0 ? ", causal to the last key"
      : s.causal                      ? ", causal"
                                      : "",
      s.window > 0 ? tessera::detail::concat(", window ", s.window) : std::string());
}

/// How many samples and key-value heads (each with its query heads) cuDNN gets at once in backward.
struct AttentionPiece {
  std::int64_t batch = 0, kv_heads = 0;
  bool operator==(const AttentionPiece&) const = default;
};

/// Bytes of the 2-byte matrix dP, padded to tiles, that cuDNN keeps in backward so that its sums have a fixed
/// order. Its fast path without that matrix adds up dQ in whatever order blocks finish
/// (AttentionShape::deterministic).
inline std::int64_t cudnn_score_bytes(const AttentionShape& s, const AttentionPiece& piece) {
  const std::int64_t rows = (s.seq_q + 63) / 64 * 64, cols = (s.seq_k + 127) / 128 * 128;
  return 2 * piece.batch * piece.kv_heads * (s.heads / s.kv_heads) * rows * cols;
}

/// The largest equal pieces, whole samples first, whose matrix fits `bytes`; single groups of heads of single
/// samples if none does.
inline AttentionPiece cudnn_backward_piece(const AttentionShape& s, std::int64_t bytes) {
  for (std::int64_t batch = s.batch; batch >= 1; --batch) {
    const AttentionPiece piece{batch, s.kv_heads};
    if (s.batch % batch == 0 && cudnn_score_bytes(s, piece) <= bytes) return piece;
  }
  for (std::int64_t heads = s.kv_heads - 1; heads > 1; --heads) {
    const AttentionPiece piece{1, heads};
    if (s.kv_heads % heads == 0 && cudnn_score_bytes(s, piece) <= bytes) return piece;
  }
  return {1, 1};
}

/// Why the current device's cuDNN does not compute this attention, forward or backward; empty if it does.
/// Looks at the shape, then lets cuDNN plan it (once per shape, as a call would do): an unknown version may
/// still refuse. With `retry` a refusal that may have passed (memory, the driver) is asked for again, some
/// times. Errors: DeviceError if cuDNN cannot be used at all.
std::string cudnn_refusal(const AttentionShape& shape, bool backward = false, bool retry = false);
inline bool cudnn_attention_supports(const AttentionShape& shape, bool backward = false) {
  return cudnn_refusal(shape, backward).empty();
}

/// Makes the handle of a stream of the current device; where cuDNN cannot be used, its first use says so.
void cudnn_prepare(void* stream) noexcept;
/// Ends the handle of a stream of the current device.
void cudnn_forget(void* stream) noexcept;

/// Bytes of scratch, aligned to 256 bytes, for a shape that is supported.
std::size_t cudnn_attention_forward_workspace(const AttentionShape& shape);
std::size_t cudnn_attention_backward_workspace(const AttentionShape& shape);

/// For shapes that are supported; q, k, v, o and their gradients start at multiples of 16 bytes.
/// Errors: InvalidArgument for other memory or shapes, DeviceError naming cuDNN's words and the shape.
void cudnn_attention_forward(const AttentionForward& params, const Launch& launch);
void cudnn_attention_backward(const AttentionBackward& params, const Launch& launch);

}  // namespace tessera::kernels::cuda
