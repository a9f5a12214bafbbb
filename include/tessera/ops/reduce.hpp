#pragma once
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// out[c] = beta out[c] + sum over rows of x[..., c], fp32, in an order that does not depend on threads.
void column_sum(const ExecCtx& ctx, const Tensor& x, const Tensor& out, float beta);
/// out[0] += sum of squares of x (fp32), in fp64.
void add_sum_squares(const ExecCtx& ctx, const Tensor& x, const Tensor& out);
/// Sum of all elements of x (fp32) as a fp64 tensor of one element.
Tensor sum(const ExecCtx& ctx, const Tensor& x);
/// The same, added to out[0] (fp64).
void add_sum(const ExecCtx& ctx, const Tensor& x, const Tensor& out);

}  // namespace tessera::ops
