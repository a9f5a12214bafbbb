#include "tessera/ops/reduce.hpp"

#include <algorithm>
#include <vector>

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

Tensor make_sum_runs(const ExecCtx& ctx, std::span<const Range> runs) {
  static_assert(sizeof(kernels::SumRun) == 2 * sizeof(std::int64_t));
  std::int64_t count = 0;
  for (const Range& run : runs) {
    TESSERA_CHECK(run.begin >= 0 && run.count >= 0, "a run of ", run.count, " elements from ", run.begin);
    count += (run.count + kernels::SumRun::kMost - 1) / kernels::SumRun::kMost;
  }
  if (ctx.device().is_meta()) return Tensor::empty(ctx, {count, 2}, DType::i64);
  std::vector<std::int64_t> pieces;
  pieces.reserve(static_cast<std::size_t>(2 * count));
  for (const Range& run : runs) {
    for (std::int64_t done = 0; done < run.count; done += kernels::SumRun::kMost) {
      pieces.push_back(run.begin + done);
      pieces.push_back(std::min(kernels::SumRun::kMost, run.count - done));
    }
  }
  return Tensor::from(ctx, pieces, {count, 2});
}

void add_sum_squares(const ExecCtx& ctx, const Tensor& x, const Tensor& runs, const Tensor& out) {
  detail::check_contiguous(x, "x");
  detail::check_contiguous(runs, "runs of a sum");
  TESSERA_CHECK(runs.dtype() == DType::i64 && runs.rank() == 2 && runs.size(1) == 2,
                "runs of a sum come from make_sum_runs");
  const Tensor scratch = Tensor::empty(ctx, {kernels::kSumParts}, DType::f64);
  const kernels::SumSquares params{.num_runs = runs.size(0),
                                   .runs = static_cast<const kernels::SumRun*>(runs.raw()),
                                   .x = x.data<float>(),
                                   .out = out.data<double>(),
                                   .scratch = scratch.data<double>()};
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
