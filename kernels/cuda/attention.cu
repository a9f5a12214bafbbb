#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/attention_decode.hpp"
#include "kernels/cuda/attention_fused.hpp"
#include "kernels/cuda/attention_own.hpp"
#include "kernels/cuda/notes.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

/// Who computes attention of several queries: cuDNN where it does, our own kernel of 16-bit operands, or
/// products with scores in memory between them, which is noted or refused.
enum class Way : std::uint8_t { cudnn, fused, apart };

Way way_of(const AttentionShape& shape, bool backward, bool retry) {
  const std::string why = cudnn_refusal(shape, backward, retry);
  if (why.empty()) return Way::cudnn;
  if (fuses(shape)) return Way::fused;
  TESSERA_ENSURE(DeviceError, !shape.fast_only,
                 "device.require_fast_attention is set, and neither our fused kernel nor cuDNN computes ",
                 backward ? "backward of " : "", describe_attention(shape), ": ", why);
  // Single queries have a kernel of their own, and fp32 never asked for another.
  if (shape.seq_q > 1 && shape.dtype != DType::f32) {
    attention_notes().add(
        tessera::detail::concat("attention with scores in memory, a slower way "
                                "(device.require_fast_attention would refuse it): ",
                                why));
  }
  return Way::apart;
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
  const Way way = way_of(shape, false, true);
  return way == Way::cudnn   ? cudnn_attention_forward_workspace(shape)
         : way == Way::fused ? fused_attention_forward_workspace(shape)
                             : own_attention_forward_workspace(shape);
}

std::size_t attention_backward_workspace(const AttentionShape& shape, int) {
  const Way way = way_of(shape, true, true);
  return way == Way::cudnn   ? cudnn_attention_backward_workspace(shape)
         : way == Way::fused ? fused_attention_backward_workspace(shape)
                             : own_attention_backward_workspace(shape);
}

void attention_forward(const AttentionForward& params, const Launch& launch) {
  if (decodes(params.shape)) return decode_attention(params, launch);
  if (params.shape.pages != nullptr) return attention_forward(gather_pages(params, launch), launch);
  const Way way = way_of(params.shape, false, false);
  if (way == Way::cudnn) return cudnn_attention_forward(params, launch);
  if (way == Way::fused) return fused_attention_forward(params, launch);
  own_attention_forward(params, launch);
}

void attention_backward(const AttentionBackward& params, const Launch& launch) {
  const Way way = way_of(params.shape, true, false);
  if (way == Way::cudnn) return cudnn_attention_backward(params, launch);
  if (way == Way::fused) return fused_attention_backward(params, launch);
  own_attention_backward(params, launch);
}

}  // namespace tessera::kernels::cuda
