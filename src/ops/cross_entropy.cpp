#include "tessera/ops/cross_entropy.hpp"

#include "kernels/api/cross_entropy.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {

CrossEntropy cross_entropy(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels) {
  Tensor loss = Tensor::empty(ctx, {labels.numel()}, DType::f32);
  Tensor lse = cross_entropy_into(ctx, logits, labels, loss);
  return {std::move(loss), std::move(lse)};
}

Tensor cross_entropy_into(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels,
                          const Tensor& loss) {
  const detail::Matrix m = detail::as_matrix(logits, "logits");
  TESSERA_CHECK_EQ(labels.numel(), m.rows, "one label per row of logits");
  TESSERA_CHECK(loss.numel() == m.rows && loss.is_contiguous(), "one loss per row of logits: ", loss.shape());
  Tensor lse = Tensor::empty(ctx, {m.rows}, DType::f32);
  const kernels::CrossEntropyForward params{
      m.rows,           m.cols, m.ld, m.dtype, m.data, labels.data<std::int32_t>(), loss.data<float>(),
      lse.data<float>()};
  TESSERA_DISPATCH(ctx, cross_entropy_forward, params);
  return lse;
}

Tensor cross_entropy_part(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels,
                          std::int64_t vocab_begin) {
  const detail::Matrix m = detail::as_matrix(logits, "logits");
  TESSERA_CHECK_EQ(labels.numel(), m.rows, "one label per row of logits");
  Tensor part = Tensor::empty(ctx, {2, m.rows}, DType::f32);
  const kernels::CrossEntropyForward params{.rows = m.rows,
                                            .cols = m.cols,
                                            .ld = m.ld,
                                            .dtype = m.dtype,
                                            .logits = m.data,
                                            .labels = labels.data<std::int32_t>(),
                                            .loss = part.data<float>(),
                                            .lse = part.data<float>() + m.rows,
                                            .vocab_begin = vocab_begin};
  TESSERA_DISPATCH(ctx, cross_entropy_forward, params);
  return part;
}

Tensor combine_cross_entropy_into(const ExecCtx& ctx, const Tensor& parts, const Tensor& labels,
                                  const Tensor& loss) {
  const std::int64_t rows = labels.numel();
  TESSERA_CHECK(parts.rank() == 3 && parts.size(1) == 2 && parts.size(2) == rows && parts.is_contiguous(),
                "parts of a cross-entropy of ", rows, " rows are [parts, 2, rows], not ", parts.shape());
  TESSERA_CHECK(loss.numel() == rows && loss.is_contiguous(), "one loss per row of logits: ", loss.shape());
  Tensor lse = Tensor::empty(ctx, {rows}, DType::f32);
  const kernels::CrossEntropyCombine params{rows,
                                            parts.size(0),
                                            parts.data<float>(),
                                            labels.data<std::int32_t>(),
                                            loss.data<float>(),
                                            lse.data<float>()};
  TESSERA_DISPATCH(ctx, cross_entropy_combine, params);
  return lse;
}

void cross_entropy_backward_in_place(const ExecCtx& ctx, const Tensor& logits, const Tensor& labels,
                                     const Tensor& lse, const Tensor& upstream, std::int64_t vocab_begin) {
  const detail::Matrix m = detail::as_matrix(logits, "logits");
  TESSERA_CHECK(labels.numel() == m.rows && lse.numel() == m.rows && upstream.numel() == m.rows,
                "labels, log-sum-exp and upstream gradient need one value for each of ", m.rows, " rows");
  const kernels::CrossEntropyBackward params{m.rows,
                                             m.cols,
                                             m.ld,
                                             m.dtype,
                                             m.data,
                                             labels.data<std::int32_t>(),
                                             lse.data<float>(),
                                             upstream.data<float>(),
                                             vocab_begin};
  TESSERA_DISPATCH(ctx, cross_entropy_backward, params);
}

}  // namespace tessera::ops
