#include "parallel/arriving.hpp"

#include "tessera/ops/elementwise.hpp"

namespace tessera::detail {
namespace {

Tensor dense(const ExecCtx& ctx, const Tensor& x) { return x.is_contiguous() ? x : ops::contiguous(ctx, x); }

}  // namespace

Shape own_positions_shape(const TensorParallel& tp, Shape shape) {
  TESSERA_CHECK(shape[0] % tp.size() == 0, shape[0], " positions cannot be shared evenly by ", tp.size(),
                " tensor ranks");
  shape[0] /= tp.size();
  return shape;
}

Arriving all_reduce(const ExecCtx& ctx, const TensorParallel& tp, Tensor x, const Where& where) {
  if (!x.is_unique() || !x.is_contiguous()) x = ops::contiguous(ctx, x);
  Pending pending = tp.comm->all_reduce(ctx, x, ReduceOp::sum, where);
  return {std::move(x), std::move(pending)};
}

Arriving gather_positions(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x, const Where& where) {
  Shape shape = x.shape();
  shape[0] *= tp.size();
  Tensor whole = Tensor::empty(ctx, shape, x.dtype());
  Pending pending = tp.comm->all_gather(ctx, dense(ctx, x), whole, {}, where);
  return {std::move(whole), std::move(pending)};
}

Arriving reduce_scatter_positions(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x,
                                  const Where& where) {
  Tensor part = Tensor::empty(ctx, own_positions_shape(tp, x.shape()), x.dtype());
  Pending pending = tp.comm->reduce_scatter(ctx, dense(ctx, x), part, {}, ReduceOp::sum, where);
  return {std::move(part), std::move(pending)};
}

Arriving sum_partial(const ExecCtx& ctx, const TensorParallel& tp, Tensor x, const Where& where) {
  if (!tp.active()) return {std::move(x), Pending()};
  return tp.sharded_sequence() ? reduce_scatter_positions(ctx, tp, x, where)
                               : all_reduce(ctx, tp, std::move(x), where);
}

Tensor own_positions(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x) {
  const std::int64_t count = own_positions_shape(tp, x.shape())[0];
  return ops::contiguous(ctx, x.narrow(0, tp.rank() * count, count));
}

std::int64_t first_row(const TensorParallel& tp, const Placement& placement) {
  if (!tp.active()) return 0;
  TESSERA_CHECK(placement.dim() == 0 && placement.segments().size() == 1,
                "a vocabulary is split by rows in one run per tensor rank; this table of ",
                placement.global(), " is not");
  return placement.segments()[0].global;
}

}  // namespace tessera::detail
