#pragma once
/// Attention of 16-bit operands that keeps scores in registers, whatever the masks, with dropout, ALiBi,
/// biases by distance and softcaps: what cuDNN does not take.

#include <cstddef>
#include <string>

#include "kernels/api/attention.hpp"

namespace tessera::kernels::cuda {

/// Whether the functions below compute it: several queries of 16 bits, head_dim a multiple of 8 up to 128 and
/// strides of 8, no pages, and a device of compute capability 8.0 or newer.
bool fuses(const AttentionShape& shape);

std::size_t fused_attention_forward_workspace(const AttentionShape& shape);
std::size_t fused_attention_backward_workspace(const AttentionShape& shape);
/// The launchers attention_forward and attention_backward for such shapes; operands are 16-byte aligned.
/// Every sum has a fixed order.
void fused_attention_forward(const AttentionForward& params, const Launch& launch);
void fused_attention_backward(const AttentionBackward& params, const Launch& launch);

}  // namespace tessera::kernels::cuda
