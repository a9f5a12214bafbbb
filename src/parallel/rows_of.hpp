#pragma once
#include "tessera/ops/embedding.hpp"

namespace tessera::detail {

/// Rows `index` of x [n, c] or [n]; zeros for an index of -1.
inline Tensor rows_of(const ExecCtx& ctx, const Tensor& x, const Tensor& index) {
  const std::int64_t width = x.rank() == 1 ? 1 : x.size(1);
  const Tensor rows =
      ops::embedding(ctx, index, x.view({x.size(0), width}), {}, {}, {.out = x.dtype(), .dropout = {}});
  return x.rank() == 1 ? rows.view({index.numel()}) : rows;
}

}  // namespace tessera::detail
