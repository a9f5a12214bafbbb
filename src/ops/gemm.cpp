#include "tessera/ops/gemm.hpp"

#include "kernels/api/gemm.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"
#include "tessera/ops/reduce.hpp"

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

kernels::Gemm describe_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y) {
  kernels::Gemm gemm =
      describe(as_matrix(x, "x"), as_matrix(weight, "weight"), as_matrix(y, "y"), false, true);
  if (bias) {
    TESSERA_CHECK(bias.shape() == Shape{gemm.n} && bias.dtype() == x.dtype(), "bias of shape ", bias.shape(),
                  " and dtype ", bias.dtype(), " for a linear with ", gemm.n, " outputs in ", x.dtype());
    gemm.bias = bias.raw();
  }
  return gemm;
}

/// How a product applies an activation, and its gradient; none: it does not.
struct Epilogues {
  kernels::Epilogue forward = kernels::Epilogue::none, backward = kernels::Epilogue::none;
};
Epilogues epilogues_of(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::gelu_tanh:
      return {kernels::Epilogue::gelu_tanh, kernels::Epilogue::dgelu_tanh};
    case ActivationKind::gelu_erf:
      return {kernels::Epilogue::gelu_erf, kernels::Epilogue::dgelu_erf};
    case ActivationKind::relu:
    case ActivationKind::silu:
    case ActivationKind::tanh:
    case ActivationKind::swiglu:
    case ActivationKind::geglu:
      break;
  }
  return {};
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
  as_matrix(x, "x");
  Shape shape = x.shape();
  shape[-1] = as_matrix(weight, "weight").rows;
  Tensor y = empty_linear(ctx, shape, x.dtype(), row_padding);
  linear_into(ctx, x, weight, bias, y);
  return y;
}

Tensor empty_linear(const ExecCtx& ctx, const Shape& shape, DType dtype, std::int64_t row_padding) {
  if (row_padding <= 1) return Tensor::empty(ctx, shape, dtype);
  const std::int64_t cols = shape[-1], rows = cols == 0 ? 0 : shape.numel() / cols;
  const std::int64_t ld = (cols + row_padding - 1) / row_padding * row_padding;
  return Tensor::empty(ctx, {rows, ld}, dtype).narrow(1, 0, cols);
}

void linear_into(const ExecCtx& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& y) {
  run(ctx, describe_linear(x, weight, bias, y));
}

void linear_with_activation_into(const ExecCtx& ctx, const Tensor& x, const Tensor& weight,
                                 const Tensor& bias, ActivationKind kind, const LinearActivation& result) {
  const kernels::Epilogue epilogue = epilogues_of(kind).forward;
  const Tensor& pre = result.pre ? result.pre : result.y;
  if (epilogue == kernels::Epilogue::none) {
    linear_into(ctx, x, weight, bias, pre);
    return activation_into(ctx, pre, result.y, kind);
  }
  detail::check_contiguous_floats(pre, "pre");
  detail::check_contiguous(result.y, "y");
  detail::check_same_shape(pre, result.y, "activation");
  TESSERA_CHECK_EQ(result.y.dtype(), pre.dtype(), "dtype of an activation");
  kernels::Gemm gemm = describe_linear(x, weight, bias, result.y);
  if (result.pre) gemm.pre = result.pre.raw();
  gemm.epilogue = epilogue;
  run(ctx, gemm);
}

void linear_backward_input_into(const ExecCtx& ctx, const Tensor& dy, const Tensor& weight, const Tensor& pre,
                                ActivationKind kind, const Tensor& dpre) {
  const kernels::Epilogue epilogue = epilogues_of(kind).backward;
  if (epilogue == kernels::Epilogue::none) {
    matmul_into(ctx, dy, weight, dpre, 0.0f, false, false);
    return activation_backward_into(ctx, pre, dpre, dpre, kind);
  }
  const Matrix mw = as_matrix(weight, "weight");
  detail::check_contiguous(dpre, "dpre");
  detail::check_contiguous_floats(pre, "pre");
  detail::check_same_shape(pre, dpre, "activation gradient");
  TESSERA_CHECK_EQ(dy.dtype(), pre.dtype(), "dtype of the gradient of an activation");
  kernels::Gemm gemm = describe(as_matrix(dy, "dy"), mw, as_matrix(dpre, "dpre"), false, false);
  gemm.pre = pre.raw();
  gemm.epilogue = epilogue;
  run(ctx, gemm);
}

namespace {

kernels::Gemm describe_weight_gradient(const Tensor& dy, const Tensor& x, const Tensor& dweight, float beta) {
  TESSERA_CHECK(dweight.dtype() == DType::f32, "weight gradients are float32, not ", dweight.dtype());
  kernels::Gemm gemm =
      describe(as_matrix(dy, "dy"), as_matrix(x, "x"), as_matrix(dweight, "dweight"), true, false);
  gemm.beta = beta;
  return gemm;
}

}  // namespace

void linear_backward_weight(const ExecCtx& ctx, const Tensor& dy, const Tensor& x, const Tensor& dweight,
                            float beta) {
  run(ctx, describe_weight_gradient(dy, x, dweight, beta));
}

void linear_backward_weight(const ExecCtx& ctx, const Tensor& dy, const Tensor& x, const Tensor& dweight,
                            float beta, const Tensor& dbias, float bias_beta) {
  kernels::Gemm gemm = describe_weight_gradient(dy, x, dweight, beta);
  if (gemm.n == 0) return column_sum(ctx, dy, dbias, bias_beta);
  TESSERA_CHECK_EQ(dbias.numel(), gemm.m, "column sums");
  const Tensor scratch = Tensor::empty(ctx, {kernels::kReduceParts, gemm.m}, DType::f32);
  gemm.column_sums = dbias.data<float>();
  gemm.sums_scratch = scratch.data<float>();
  gemm.sums_beta = bias_beta;
  run(ctx, gemm);
}

}  // namespace tessera::ops
