#pragma once
/// Collectives under way, with the tensors they bring.

#include "tessera/parallel/functions.hpp"

namespace tessera::detail {

using Where = Communicator::Where;

/// A tensor that is being communicated. Default constructed: an undefined one that is here.
class Arriving {
 public:
  Arriving() = default;
  Arriving(Tensor tensor, Pending pending) : tensor_(std::move(tensor)), pending_(std::move(pending)) {}
  /// Waits for it and hands it over.
  Tensor take(const ExecCtx& ctx) {
    std::exchange(pending_, Pending()).wait(ctx);
    return std::move(tensor_);
  }

 private:
  Tensor tensor_;
  Pending pending_;
};

/// The sum over ranks; x is overwritten if nobody else holds it.
Arriving all_reduce(const ExecCtx& ctx, const TensorParallel& tp, Tensor x,
                    const Where& where = Where::current());
/// Every rank's x along dimension 0: [n, ...] to [n * size, ...].
Arriving gather_positions(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x,
                          const Where& where = Where::current());
/// This rank's part of the sum over ranks: [n, ...] to [n / size, ...]. Errors: InvalidArgument if size does
/// not divide n.
Arriving reduce_scatter_positions(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x,
                                  const Where& where = Where::current());
/// The sum of the ranks' x as the layer's surroundings hold it: whole, or own positions with sequence
/// parallelism.
Arriving sum_partial(const ExecCtx& ctx, const TensorParallel& tp, Tensor x,
                     const Where& where = Where::current());
/// Shape of one rank's positions of a tensor. Errors as reduce_scatter_positions.
Shape own_positions_shape(const TensorParallel& tp, Shape shape);
/// A copy of this rank's positions of x. Errors as reduce_scatter_positions.
Tensor own_positions(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x);

/// First row of this rank's part of a table split by rows, 0 with one rank. Errors: InvalidArgument for any
/// other placement.
std::int64_t first_row(const TensorParallel& tp, const Placement& placement);

}  // namespace tessera::detail
