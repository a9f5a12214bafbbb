#pragma once
/// Products beside the collective that brings their input or adds up their result.

#include <functional>
#include <vector>

#include "parallel/arriving.hpp"

namespace tessera::detail {

/// x as a matrix: its leading dimensions taken together.
Tensor as_rows(const Tensor& x);

/// Multiplies `rows`, which are those from `first` on of a whole.
using MultiplyRows = std::function<void(const Tensor& rows, std::int64_t first)>;

/// Gathers every rank's x [n, ...] along dimension 0 and multiplies it: own rows while the first of the
/// others are on their way, and each rank's while the next one's are; all at once if tp.chunks is 1. `cols`:
/// columns of the product. Returns the gathered x.
Tensor gather_and_multiply(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x, std::int64_t cols,
                           const MultiplyRows& multiply, const Where& where = Where::current());

/// A part of a product.
struct Block {
  std::int64_t row = 0, rows = 0, col = 0, cols = 0;
};
/// Writes a block of a product to `out`, a contiguous matrix.
using MultiplyBlock = std::function<void(const Block& block, const Tensor& out)>;

/// A product whose sum over ranks is on its way. Default constructed: an undefined one that is here.
class ArrivingSum {
 public:
  /// Waits for it and hands it over.
  Tensor take(const ExecCtx& ctx);

 private:
  friend ArrivingSum multiply_and_sum(const ExecCtx&, const TensorParallel&, const Shape&, DType,
                                      std::int64_t, MultiplyBlock, const Where&);
  std::vector<Arriving> pieces_;
  Tensor whole_;  ///< what several pieces are rows of; undefined: they are columns of a tensor of `shape_`
  Shape shape_;
};

/// In how many pieces a product of `shape` [positions, batch, cols] is summed (TensorParallel::chunks).
std::int64_t pieces_of_sum(const TensorParallel& tp, const Shape& shape);

/// What sum_partial gives of a product of `shape` [positions, batch, cols], at most so many pieces (one
/// without ranks) one after the other: each travels while the next is multiplied. What `multiply` holds is
/// let go of after the last product.
ArrivingSum multiply_and_sum(const ExecCtx& ctx, const TensorParallel& tp, const Shape& shape, DType dtype,
                             std::int64_t pieces, MultiplyBlock multiply,
                             const Where& where = Where::current());

}  // namespace tessera::detail
