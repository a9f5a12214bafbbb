#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/attention_decode.hpp"
#include "kernels/cuda/attention_own.hpp"
#include "kernels/cuda/notes.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

/// Whether cuDNN computes it; where it does not, that is noted or refused.
bool is_fast(const AttentionShape& shape, bool backward, bool retry) {
  const std::string why = cudnn_refusal(shape, backward, retry);
  if (why.empty()) return true;
  TESSERA_ENSURE(DeviceError, !shape.fast_only,
                 "device.require_fast_attention is set, and cuDNN does not compute ",
                 backward ? "backward of " : "", describe_attention(shape), ": ", why);
  // Single queries have a kernel of their own, and fp32 never asked for another.
  if (shape.seq_q > 1 && shape.dtype != DType::f32) {
    attention_notes().add(tessera::detail::concat(
        "attention without cuDNN, on a slower way (device.require_fast_attention would refuse it): ", why));
  }
  return false;
}

}  // namespace

Notes& attention_notes() {
  static Notes* const notes = new Notes;
  return *notes;
}

std::string take_attention_note() { return attention_notes().take(); }

// What the workspace was asked for is what is launched: only there a refusal that may have passed is asked
// again.
std::size_t attention_forward_workspace(const AttentionShape& shape, int threads) {
  if (decodes(shape)) return decode_attention_workspace(shape);
  if (shape.pages != nullptr)
    return gathered_bytes(shape) + attention_forward_workspace(gathered_shape(shape), threads);
  if (is_fast(shape, false, true)) return cudnn_attention_forward_workspace(shape);
  return own_attention_forward_workspace(shape);
}

std::size_t attention_backward_workspace(const AttentionShape& shape, int) {
  if (is_fast(shape, true, true)) return cudnn_attention_backward_workspace(shape);
  return own_attention_backward_workspace(shape);
}

void attention_forward(const AttentionForward& params, const Launch& launch) {
  if (decodes(params.shape)) {
    decode_attention(params, launch);
  } else if (params.shape.pages != nullptr) {
    attention_forward(gather_pages(params, launch), launch);
  } else if (is_fast(params.shape, false, false)) {
    cudnn_attention_forward(params, launch);
  } else {
    own_attention_forward(params, launch);
  }
}

void attention_backward(const AttentionBackward& params, const Launch& launch) {
  if (is_fast(params.shape, true, false)) {
    cudnn_attention_backward(params, launch);
  } else {
    own_attention_backward(params, launch);
  }
}

}  // namespace tessera::kernels::cuda
