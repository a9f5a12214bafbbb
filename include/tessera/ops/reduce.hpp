#pragma once
#include <span>

#include "tessera/base/range.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// out[c] = beta out[c] + sum over rows of x[..., c], fp32, in an order that does not depend on threads.
void column_sum(const ExecCtx& ctx, const Tensor& x, const Tensor& out, float beta);
/// Runs as add_sum_squares takes them, i64 [pieces, 2]: begin and count of pieces of them, none of them long.
Tensor make_sum_runs(const ExecCtx& ctx, std::span<const Range> runs);
/// out[0] += sum of squares of the elements of x (flat fp32) that lie in `runs`, in fp64, in one pass. The
/// order depends on the lengths of the runs alone. `runs` comes from make_sum_runs and is not looked into:
/// no piece may reach beyond x.
void add_sum_squares(const ExecCtx& ctx, const Tensor& x, const Tensor& runs, const Tensor& out);
/// Sum of all elements of x (fp32) as a fp64 tensor of one element.
Tensor sum(const ExecCtx& ctx, const Tensor& x);
/// The same, added to out[0] (fp64).
void add_sum(const ExecCtx& ctx, const Tensor& x, const Tensor& out);

}  // namespace tessera::ops
