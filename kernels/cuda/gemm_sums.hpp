#pragma once
/// The column sums beside a product, as far as its own epilogue has not done them.

#include "kernels/api/elementwise.hpp"
#include "kernels/cuda/gemm_plan.hpp"

namespace tessera::kernels::cuda {

/// All of them; or adds those that the product has written to what was there.
inline void finish_sums(const Gemm& g, const Fused& fused, const Launch& launch) {
  if (g.column_sums == nullptr) return;
  if (!fused.sums) return column_sum(sums_of(g), launch);
  if (g.sums_beta != 0.0f) axpby({.n = g.m, .beta = 1.0f, .x = sums_target(g), .y = g.column_sums}, launch);
}

}  // namespace tessera::kernels::cuda
