#pragma once
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
/// dx = dy weight, in dy's dtype.
Tensor linear_backward_input(const ExecCtx& ctx, const Tensor& dy, const Tensor& weight);
/// dweight = beta dweight + dy^T x, in fp32.
void linear_backward_weight(const ExecCtx& ctx, const Tensor& dy, const Tensor& x, const Tensor& dweight,
                            float beta);

}  // namespace tessera::ops
