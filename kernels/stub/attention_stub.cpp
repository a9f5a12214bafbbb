/// What kernels/cuda has of attention beyond kernels/api, in builds without CUDA: it refuses by name.

#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/attention_own.hpp"
#include "kernels/cuda/softmax.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

[[noreturn]] void no_cuda(const char* kernel) {
  throw ConfigError(
      tessera::detail::concat("this build of Tessera has no CUDA backend (wanted by kernel ", kernel,
                              "): set device.type to cpu or auto, or build with -DTESSERA_CUDA=ON"));
}

}  // namespace

std::string cudnn_refusal(const AttentionShape&, bool, bool) { return "this build has no CUDA backend"; }
void key_ranges(const AttentionShape&, KeyRange*, const Launch&) { no_cuda("key_ranges"); }
void softmax_forward(const SoftmaxForward&, const Launch&) { no_cuda("softmax_forward"); }
void softmax_backward(const SoftmaxBackward&, const Launch&) { no_cuda("softmax_backward"); }
void add_bias_gradient(const BiasGradient&, const Launch&) { no_cuda("add_bias_gradient"); }

std::size_t own_attention_forward_workspace(const AttentionShape&, std::size_t) {
  no_cuda("own_attention_forward_workspace");
}
std::size_t own_attention_backward_workspace(const AttentionShape&, std::size_t) {
  no_cuda("own_attention_backward_workspace");
}
void own_attention_forward(const AttentionForward&, const Launch&, std::size_t) {
  no_cuda("own_attention_forward");
}
void own_attention_backward(const AttentionBackward&, const Launch&, std::size_t) {
  no_cuda("own_attention_backward");
}

}  // namespace tessera::kernels::cuda
