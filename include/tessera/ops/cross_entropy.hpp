#pragma once
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

inline constexpr std::int32_t kIgnoredLabel = -100;

struct CrossEntropy {
  Tensor loss;  ///< [rows] fp32: -log p(label); 0 where the label is kIgnoredLabel
  Tensor lse;   ///< [rows] fp32: log-sum-exp of each row, for backward
};

/// logits: [rows, vocab] whose rows may be apart; labels: int32 [rows], kIgnoredLabel or below vocab.
CrossEntropy cross_entropy(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels);

/// The same into `loss` (contiguous, one fp32 a row); returns lse.
Tensor cross_entropy_into(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels, const Tensor& loss);

/// Writes upstream[row] * (softmax - onehot) over `logits`, and zeros over what lies between its rows:
/// padding as ops::linear makes it.
void cross_entropy_backward_in_place(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels,
                                     const Tensor& lse, const Tensor& upstream);

}  // namespace tessera::ops
