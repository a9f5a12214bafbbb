/// The stand-in for attention by cuDNN: it takes no shape, so our own kernels compute all of them.

#include "kernels/cuda/attention_cudnn.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

[[noreturn]] void refuse() {
  throw InternalError("cuDNN was asked for attention, but the emulator has none: no shape is supported");
}

}  // namespace

std::string cudnn_refusal(const AttentionShape& shape, bool, bool) {
  const std::string why = why_not_cudnn(shape, 9);
  return why.empty() ? "the emulator has no cuDNN" : why;
}
void cudnn_prepare(void*) noexcept {}
void cudnn_forget(void*) noexcept {}
std::size_t cudnn_attention_forward_workspace(const AttentionShape&) { refuse(); }
std::size_t cudnn_attention_backward_workspace(const AttentionShape&) { refuse(); }
void cudnn_attention_forward(const AttentionForward&, const Launch&) { refuse(); }
void cudnn_attention_backward(const AttentionBackward&, const Launch&) { refuse(); }

}  // namespace tessera::kernels::cuda
