#pragma once
#include "tessera/base/labels.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

struct CrossEntropy {
  Tensor loss;  ///< [rows] fp32: -log p(label); 0 where the label is kIgnoredLabel
  Tensor lse;   ///< [rows] fp32: log-sum-exp of each row, for backward
};

/// logits: [rows, vocab] whose rows may be apart; labels: int32 [rows], kIgnoredLabel or below vocab.
CrossEntropy cross_entropy(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels);

/// The same into `loss` (contiguous, one fp32 a row); returns lse.
Tensor cross_entropy_into(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels, const Tensor& loss);

/// Of a vocabulary split over ranks: column j of logits is token vocab_begin + j. Returns [2, rows] fp32: the
/// loss as if this part were the whole vocabulary, infinite for a label in another part, and the log-sum-exp.
Tensor cross_entropy_part(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels,
                          std::int64_t vocab_begin);

/// Writes the loss over the whole vocabulary, from those of its parts, into `loss` (contiguous, one fp32 a
/// row); returns lse. parts: [n, 2, rows].
Tensor combine_cross_entropy_into(const ExecCtx& ctx, const Tensor& parts, const Tensor& labels,
                                  const Tensor& loss);

/// Writes upstream[row] * (softmax - onehot) over `logits`, and zeros over what lies between its rows:
/// padding as ops::linear makes it. Logits may be a part of the vocabulary, lse is the whole's.
void cross_entropy_backward_in_place(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels,
                                     const Tensor& lse, const Tensor& upstream, std::int64_t vocab_begin = 0);

}  // namespace tessera::ops
