#include "tessera/ops/reduce.hpp"

#include "kernels/api/reduce.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {

void column_sum(const ExecCtx& ctx, const Tensor& x, const Tensor& out, float beta) {
  const detail::Matrix m = detail::as_matrix(x, "x");
  TESSERA_CHECK_EQ(out.numel(), m.cols, "column sums");
  const Tensor scratch = Tensor::empty(ctx, {kernels::kReduceParts, m.cols}, DType::f32);
  const kernels::ColumnSum params{
      m.rows, m.cols, m.ld, m.dtype, m.data, out.data<float>(), beta, scratch.data<float>()};
  TESSERA_DISPATCH(ctx, column_sum, params);
}

void add_sum_squares(const ExecCtx& ctx, const Tensor& x, const Tensor& out) {
  detail::check_contiguous(x, "x");
  const Tensor scratch = Tensor::empty(ctx, {kernels::kSumParts}, DType::f64);
  const kernels::SumSquares params{x.numel(), x.data<float>(), out.data<double>(), scratch.data<double>()};
  TESSERA_DISPATCH(ctx, sum_squares, params);
}

namespace {

void sum_into(const ExecCtx& ctx, const Tensor& x, const Tensor& out, bool add) {
  detail::check_contiguous(x, "x");
  const Tensor scratch = Tensor::empty(ctx, {kernels::kSumParts}, DType::f64);
  const kernels::Sum params{x.numel(), add, x.data<float>(), out.data<double>(), scratch.data<double>()};
  TESSERA_DISPATCH(ctx, sum, params);
}

}  // namespace

Tensor sum(const ExecCtx& ctx, const Tensor& x) {
  Tensor out = Tensor::empty(ctx, {1}, DType::f64);
  sum_into(ctx, x, out, false);
  return out;
}

void add_sum(const ExecCtx& ctx, const Tensor& x, const Tensor& out) { sum_into(ctx, x, out, true); }

}  // namespace tessera::ops
