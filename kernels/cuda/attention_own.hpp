#pragma once
/// Attention for every shape: batched matrix products around the kernels of softmax.hpp, a block of score
/// matrices at a time. Scores and sums are fp32; probabilities and score gradients enter their products in
/// the operands' dtype. The value rows of masked keys must be finite: they are multiplied by zeros.

#include <cstddef>

#include "kernels/api/attention.hpp"

namespace tessera::kernels::cuda {

/// What the score matrices of one block, and the sums of dK and dV over blocks, may take together. One
/// (sample, head) and sixteen queries are always processed at once, however large that is.
inline constexpr std::size_t kAttentionBlockBytes = std::size_t{256} << 20;

/// Bytes of scratch: blocks of at most `block_bytes`, and a pair of integers for every query of every sample.
std::size_t own_attention_forward_workspace(const AttentionShape& shape,
                                            std::size_t block_bytes = kAttentionBlockBytes);
std::size_t own_attention_backward_workspace(const AttentionShape& shape,
                                             std::size_t block_bytes = kAttentionBlockBytes);

/// The launchers of kernels/api/attention.hpp, by this path; the workspace is that of the same `block_bytes`.
/// The results depend on `block_bytes` by the order of dK's and dV's sums. Errors: DeviceError.
void own_attention_forward(const AttentionForward& params, const Launch& launch,
                           std::size_t block_bytes = kAttentionBlockBytes);
void own_attention_backward(const AttentionBackward& params, const Launch& launch,
                            std::size_t block_bytes = kAttentionBlockBytes);

}  // namespace tessera::kernels::cuda
