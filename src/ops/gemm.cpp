#include "tessera/ops/gemm.hpp"

#include "kernels/api/gemm.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {

using detail::as_matrix;
using detail::Matrix;

namespace {

kernels::Gemm describe(const Matrix& a, const Matrix& b, const Matrix& c, bool trans_a, bool trans_b) {
  const std::int64_t m = trans_a ? a.cols : a.rows;
  const std::int64_t k = trans_a ? a.rows : a.cols;
  const std::int64_t n = trans_b ? b.rows : b.cols;
  TESSERA_CHECK_EQ((trans_b ? b.cols : b.rows), k, "inner dimensions of a matrix product");
  TESSERA_CHECK(c.rows == m && c.cols == n, "a product of shape [", m, ", ", n,
                "] does not fit a target of [", c.rows, ", ", c.cols, "]");
  TESSERA_CHECK(a.dtype == b.dtype, "both operands of a product need one dtype: ", a.dtype, " and ", b.dtype);
  return {.a = a.data,
          .b = b.data,
          .c = c.data,
          .m = m,
          .n = n,
          .k = k,
          .lda = a.ld,
          .ldb = b.ld,
          .ldc = c.ld,
          .trans_a = trans_a,
          .trans_b = trans_b,
          .ab_dtype = a.dtype,
          .c_dtype = c.dtype};
}

void run(const ExecCtx& ctx, const kernels::Gemm& gemm) {
  if (gemm.m == 0 || gemm.n == 0) return;
  TESSERA_DISPATCH(ctx, gemm, gemm);
}

}  // namespace

Tensor matmul(const ExecCtx& ctx, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  const Matrix ma = as_matrix(a, "a"), mb = as_matrix(b, "b");
  Tensor c = Tensor::empty(ctx, {options.trans_a ? ma.cols : ma.rows, options.trans_b ? mb.rows : mb.cols},
                           options.out);
  matmul_into(ctx, a, b, c, 0.0f, options.trans_a, options.trans_b);
  return c;
}

void matmul_into(const ExecCtx& ctx, const Tensor& a, const Tensor& b, const Tensor& c, float beta,
                 bool trans_a, bool trans_b) {
  kernels::Gemm gemm = describe(as_matrix(a, "a"), as_matrix(b, "b"), as_matrix(c, "c"), trans_a, trans_b);
  gemm.beta = beta;
  run(ctx, gemm);
}

Tensor linear(const ExecCtx& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
              std::int64_t row_padding) {
  const Matrix mx = as_matrix(x, "x"), mw = as_matrix(weight, "weight");
  Shape shape = x.shape();
  shape[-1] = mw.rows;
  Tensor y;
  if (row_padding > 1) {
    const std::int64_t ld = (mw.rows + row_padding - 1) / row_padding * row_padding;
    y = Tensor::empty(ctx, {mx.rows, ld}, x.dtype()).narrow(1, 0, mw.rows);
  } else {
    y = Tensor::empty(ctx, shape, x.dtype());
  }
  kernels::Gemm gemm = describe(mx, mw, as_matrix(y, "y"), false, true);
  if (bias) {
    TESSERA_CHECK(bias.shape() == Shape{mw.rows} && bias.dtype() == x.dtype(), "bias of shape ", bias.shape(),
                  " and dtype ", bias.dtype(), " for a linear with ", mw.rows, " outputs in ", x.dtype());
    gemm.bias = bias.raw();
  }
  run(ctx, gemm);
  return y;
}

Tensor linear_backward_input(const ExecCtx& ctx, const Tensor& dy, const Tensor& weight) {
  const Matrix mw = as_matrix(weight, "weight");
  Shape shape = dy.shape();
  shape[-1] = mw.cols;
  Tensor dx = Tensor::empty(ctx, shape, dy.dtype());
  run(ctx, describe(as_matrix(dy, "dy"), mw, as_matrix(dx, "dx"), false, false));
  return dx;
}

void linear_backward_weight(const ExecCtx& ctx, const Tensor& dy, const Tensor& x, const Tensor& dweight,
                            float beta) {
  TESSERA_CHECK(dweight.dtype() == DType::f32, "weight gradients are float32, not ", dweight.dtype());
  matmul_into(ctx, dy, x, dweight, beta, true, false);
}

}  // namespace tessera::ops
