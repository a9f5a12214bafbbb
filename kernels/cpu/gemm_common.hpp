#pragma once
/// What the two implementations of gemm share.

#include "kernels/api/gemm.hpp"

namespace tessera::kernels::cpu {

/// The product with operands or result of 16 bits that the machine does not multiply (float16, or bfloat16
/// where it only knows fp32): blocks of A and B are widened, multiplied by gemm itself in fp32 and the sum is
/// rounded once. Does not look at the epilogue.
void gemm_through_f32(const Gemm& params, const Launch& launch);

/// Whether the product is mostly the reading of B, and B lies by rows of what is summed up: a few positions
/// times a weight, as when text is generated. Does not look at the epilogue.
bool has_few_rows(const Gemm& params);
/// Such a product: B is read once, in its own dtype, by all threads of gemm. The order of each sum depends on
/// k and m alone.
void gemm_few_rows(const Gemm& params, int threads);

/// C = beta C + bias: what is left of the product when k is 0.
void gemm_without_product(const Gemm& params, const Launch& launch);

/// Where the product goes: to `pre` if that is to be written (holding C then, if beta asks for it), else to
/// C.
void* gemm_target(const Gemm& params, const Launch& launch);

/// C = activation of what gemm_target holds, or C times the activation's slope at `pre`.
void gemm_apply_epilogue(const Gemm& params, const Launch& launch);

}  // namespace tessera::kernels::cpu
