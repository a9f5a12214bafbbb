#pragma once
#include "tessera/ops/embedding.hpp"

namespace tessera::detail {

/// Rows `index` of x [n, c] or [n]; zeros for an index of -1.
inline Tensor rows_of(const ExecCtx& ctx, const Tensor& x, const Tensor& index) {
  const Tensor rows =
      ops::embedding(ctx, index, x.view({x.size(0), -1}), {}, {}, {.out = x.dtype(), .dropout = {}});
  return x.shape().rank() == 1 ? rows.view({-1}) : rows;
}

}  // namespace tessera::detail
