#pragma once
/// Between the positions that context ranks hold and whole samples.

#include <vector>

#include "tessera/parallel/context.hpp"

namespace tessera::detail {

/// Own heads at all positions, in order, of x [part.held(), batch, all heads], of which each rank holds other
/// positions. `widths`: elements of the kinds of heads in x (queries, keys, values); rank r gets the r-th of
/// as many equal parts of each.
Tensor exchange_for_heads(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part,
                          const Tensor& x, const std::vector<std::int64_t>& widths);
/// The way back, and the gradient's: own positions of all heads, of x [part.length, batch, own heads].
Tensor exchange_for_positions(const ExecCtx& ctx, const ContextParallel& context, const SequencePart& part,
                              const Tensor& x, const std::vector<std::int64_t>& widths);

}  // namespace tessera::detail
