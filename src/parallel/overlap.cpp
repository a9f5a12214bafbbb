#include "parallel/overlap.hpp"

#include <algorithm>

#include "tessera/comm/placement.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera::detail {
namespace {

/// Results of a product that keeps a GPU busy: 128 tiles of 128 x 256, about one for each multiprocessor of
/// an H100 or H200 (132). Of smaller ones a part of the GPU idles, which soon costs more than hiding a
/// collective gains.
constexpr std::int64_t kFullProduct = 128 * 128 * 256;
/// One piece of n is not hidden, so more of them gain little; each is another start of a collective.
constexpr std::int64_t kMostPieces = 4;
/// Pieces begin at multiples of so many columns: 16 bytes of a 16-bit type, the widest that products load.
constexpr std::int64_t kColumnStep = 8;

/// `whole` cut into at most `pieces` parts as even as possible that begin at multiples of `step`.
std::vector<Part> cut(std::int64_t whole, std::int64_t pieces, std::int64_t step) {
  const std::int64_t steps = std::max<std::int64_t>(1, whole / step);
  pieces = std::min(pieces, steps);
  std::vector<Part> parts;
  for (std::int64_t i = 0; i < pieces; ++i) {
    const Part part = part_of(steps, static_cast<int>(i), static_cast<int>(pieces));
    parts.push_back({part.begin * step, part.count * step});
  }
  parts.back().count = whole - parts.back().begin;
  return parts;
}

bool multiplies_own_first(const TensorParallel& tp, std::int64_t results) {
  return tp.chunks == 0 ? results >= kFullProduct : tp.chunks > 1;
}

}  // namespace

Tensor as_rows(const Tensor& x) {
  if (x.rank() == 2) return x;
  const std::int64_t cols = x.size(-1);
  return x.view({cols == 0 ? 0 : x.numel() / cols, cols});
}

Tensor gather_and_multiply(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x, std::int64_t cols,
                           const MultiplyRows& multiply, const Where& where) {
  const Tensor own = x.is_contiguous() ? x : ops::contiguous(ctx, x);
  const Tensor own_rows = as_rows(own);
  const std::int64_t count = own_rows.size(0);
  if (!multiplies_own_first(tp, count * cols)) {
    Tensor whole = gather_positions(ctx, tp, own, where).take(ctx);
    multiply(as_rows(whole), 0);
    return whole;
  }
  Shape shape = x.shape();
  shape[0] *= tp.size();
  Tensor whole = Tensor::empty(ctx, shape, x.dtype());
  const auto rows_of = [&](int rank) { return as_rows(whole).narrow(0, rank * count, count); };
  // In turn n every rank sends to the one n places after it, so that each sends and gets once at a time, and
  // one turn after the other.
  const auto sender = [&](int turn) { return (tp.rank() + tp.size() - turn) % tp.size(); };
  std::vector<Arriving> others;
  for (int turn = 1; turn < tp.size(); ++turn) {
    Tensor rows = rows_of(sender(turn));
    std::vector<std::int64_t> sent(static_cast<std::size_t>(tp.size())), brought(sent.size());
    sent[static_cast<std::size_t>((tp.rank() + turn) % tp.size())] = own.numel();
    brought[static_cast<std::size_t>(sender(turn))] = own.numel();
    Pending pending = tp.comm->all_to_all(ctx, own_rows, rows, sent, brought, where);
    others.emplace_back(std::move(rows), std::move(pending));
  }
  multiply(own_rows, tp.rank() * count);
  ops::copy(ctx, own_rows, rows_of(tp.rank()));
  for (int turn = 1; turn < tp.size(); ++turn)
    multiply(others[static_cast<std::size_t>(turn - 1)].take(ctx), sender(turn) * count);
  return whole;
}

std::int64_t pieces_of_sum(const TensorParallel& tp, const Shape& shape) {
  if (tp.chunks > 0) return tp.chunks;
  return std::clamp<std::int64_t>(shape.numel() / kFullProduct, 1, kMostPieces);
}

ArrivingSum multiply_and_sum(const ExecCtx& ctx, const TensorParallel& tp, const Shape& shape, DType dtype,
                             std::int64_t pieces, MultiplyBlock multiply, const Where& where) {
  const std::int64_t cols = shape[-1], rows = cols == 0 ? 0 : shape.numel() / cols;
  // With sequence parallelism own rows are a part of every rank's result, so a piece of rows would need a
  // product for each rank. A piece of columns is one product; its own rows are copied to their place.
  const bool by_columns = tp.sharded_sequence();
  if (!tp.active()) pieces = 1;
  const std::vector<Part> parts = by_columns ? cut(cols, pieces, kColumnStep) : cut(rows, pieces, 1);
  ArrivingSum sum;
  if (parts.size() == 1) {
    Tensor whole = Tensor::empty(ctx, shape, dtype);
    multiply({0, rows, 0, cols}, as_rows(whole));
    multiply = nullptr;
    sum.pieces_.push_back(sum_partial(ctx, tp, std::move(whole), where));
    return sum;
  }
  if (!by_columns) {
    sum.whole_ = Tensor::empty(ctx, shape, dtype);
    for (const Part& part : parts) {
      Tensor piece = as_rows(sum.whole_).narrow(0, part.begin, part.count);
      multiply({part.begin, part.count, 0, cols}, piece);
      Pending pending = tp.comm->all_reduce(ctx, piece, ReduceOp::sum, where);
      sum.pieces_.emplace_back(std::move(piece), std::move(pending));
    }
    return sum;
  }
  sum.shape_ = own_positions_shape(tp, shape);
  const std::int64_t own_rows = rows / tp.size();
  for (const Part& part : parts) {
    const Tensor piece = Tensor::empty(ctx, {rows, part.count}, dtype);
    multiply({0, rows, part.begin, part.count}, piece);
    Tensor own = piece.narrow(0, tp.rank() * own_rows, own_rows);
    Pending pending = tp.comm->reduce_scatter(ctx, piece, own, {}, ReduceOp::sum, where);
    sum.pieces_.emplace_back(std::move(own), std::move(pending));
  }
  return sum;
}

Tensor ArrivingSum::take(const ExecCtx& ctx) {
  std::vector<Arriving> pieces = std::move(pieces_);
  if (pieces.empty()) return {};
  if (pieces.size() == 1) return pieces.front().take(ctx);
  if (whole_) {
    for (Arriving& piece : pieces) piece.take(ctx);
    return std::move(whole_);
  }
  Tensor sum;
  std::int64_t col = 0;
  for (Arriving& piece : pieces) {
    const Tensor own = piece.take(ctx);
    if (!sum) sum = Tensor::empty(ctx, shape_, own.dtype());
    ops::copy(ctx, own, as_rows(sum).narrow(1, col, own.size(1)));
    col += own.size(1);
  }
  return sum;
}

}  // namespace tessera::detail
