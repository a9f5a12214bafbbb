#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/attention_own.hpp"

namespace tessera::kernels::cuda {

std::size_t attention_forward_workspace(const AttentionShape& shape, int) {
  if (cudnn_attention_supports(shape)) return cudnn_attention_forward_workspace(shape);
  return own_attention_forward_workspace(shape);
}

std::size_t attention_backward_workspace(const AttentionShape& shape, int) {
  if (cudnn_attention_supports(shape, true)) return cudnn_attention_backward_workspace(shape);
  return own_attention_backward_workspace(shape);
}

void attention_forward(const AttentionForward& params, const Launch& launch) {
  if (cudnn_attention_supports(params.shape)) {
    cudnn_attention_forward(params, launch);
  } else {
    own_attention_forward(params, launch);
  }
}

void attention_backward(const AttentionBackward& params, const Launch& launch) {
  if (cudnn_attention_supports(params.shape, true)) {
    cudnn_attention_backward(params, launch);
  } else {
    own_attention_backward(params, launch);
  }
}

}  // namespace tessera::kernels::cuda
