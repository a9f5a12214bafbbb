#pragma once
#include "tessera/ops/activation.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

struct MatmulOptions {
  bool trans_a = false;
  bool trans_b = false;
  DType out = DType::f32;
};

/// op(a) op(b) for matrices [m, k] and [k, n] (each may be a transposed view's storage by its flag),
/// accumulated in fp32. The last dimension must be contiguous, rows may be apart. Errors: InvalidArgument on
/// shapes or dtypes.
Tensor matmul(const ExecCtx& ctx, const Tensor& a, const Tensor& b, const MatmulOptions& options = {});

/// c = beta c + op(a) op(b); beta is 0 or 1. c is a matrix whose rows may be apart.
void matmul_into(const ExecCtx& ctx, const Tensor& a, const Tensor& b, const Tensor& c, float beta,
                 bool trans_a, bool trans_b);

/// y[..., n] = x[..., k] weight[n, k]^T + bias[n]; y has x's dtype. bias may be undefined. `row_padding`
/// rounds the distance between rows of y up to that many elements (y is then a strided view); 1 = contiguous.
Tensor linear(const ExecCtx& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
              std::int64_t row_padding = 1);
/// Memory for a linear's result of `shape`, as `row_padding` wants it.
Tensor empty_linear(const ExecCtx& ctx, const Shape& shape, DType dtype, std::int64_t row_padding = 1);
/// linear into `y`, a matrix whose rows may be apart.
void linear_into(const ExecCtx& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 const Tensor& y);
/// A linear's result before and after an activation; `pre` is undefined where nobody needs it.
struct LinearActivation {
  Tensor pre, y;
};
/// pre = linear(x), y = f(pre) into `result`, contiguous. GELU is made by the product; other activations are
/// a pass after it.
void linear_with_activation_into(const ExecCtx& ctx, const Tensor& x, const Tensor& weight,
                                 const Tensor& bias, ActivationKind kind, const LinearActivation& result);

/// dpre = f'(pre) (dy weight): the gradient of pre in linear(f(pre)). GELU's is made by the product. pre and
/// dpre are contiguous and have dy's dtype.
void linear_backward_input_into(const ExecCtx& ctx, const Tensor& dy, const Tensor& weight, const Tensor& pre,
                                ActivationKind kind, const Tensor& dpre);
/// dweight = beta dweight + dy^T x, in fp32.
void linear_backward_weight(const ExecCtx& ctx, const Tensor& dy, const Tensor& x, const Tensor& dweight,
                            float beta);
/// And dbias = bias_beta dbias + column sums of dy, within the same product where the backend can.
void linear_backward_weight(const ExecCtx& ctx, const Tensor& dy, const Tensor& x, const Tensor& dweight,
                            float beta, const Tensor& dbias, float bias_beta);

}  // namespace tessera::ops
