#include "tessera/ops/attention.hpp"

#include <cmath>

#include "kernels/api/attention.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

kernels::HeadStrides strides_of(const Tensor& t, const char* what) {
  TESSERA_CHECK(t.rank() == 4, what, " must be [seq, batch, heads, head_dim], not ", t.shape());
  TESSERA_CHECK(t.size(3) == 1 || t.strides()[3] == 1, what, ": head_dim must be contiguous, strides are ",
                t.strides());
  return {t.strides()[0], t.strides()[1], t.strides()[2]};
}

const std::int32_t* ints(const Tensor& t, const Shape& shape, const char* what) {
  if (!t) return nullptr;
  TESSERA_CHECK(t.shape() == shape && t.is_contiguous(), what, " must have shape ", shape, ", not ",
                t.shape());
  return t.data<std::int32_t>();
}

/// Sizes and strides of q, k and v.
void describe_operands(kernels::AttentionShape& s, const Tensor& q, const Tensor& k, const Tensor& v,
                       const AttentionOptions& options) {
  s.q_stride = strides_of(q, "q");
  s.k_stride = strides_of(k, "k");
  s.v_stride = strides_of(v, "v");
  s.seq_q = q.size(0);
  s.batch = q.size(1);
  s.heads = q.size(2);
  s.head_dim = q.size(3);
  s.seq_k = k.size(0);
  s.kv_heads = k.size(2);
  bool fits = k.shape() == v.shape() && k.size(3) == s.head_dim;
  if (options.pages) {
    s.kv_heads = k.size(1);
    s.seq_k = options.keys;
    s.page_entries = options.pages.size(1);
    s.pages = ints(options.pages, {s.batch, s.page_entries}, "pages");
    s.k_page = k.strides()[0], s.k_stride = {k.strides()[2], 0, k.strides()[1]};
    s.v_page = v.strides()[0], s.v_stride = {v.strides()[2], 0, v.strides()[1]};
    fits = fits && k.size(2) == kCachePage && cache_pages(s.seq_k) <= s.page_entries;
  } else {
    fits = fits && k.size(1) == s.batch;
  }
  TESSERA_CHECK(fits, "attention of q ", q.shape(), " over k ", k.shape(), " and v ", v.shape(),
                options.pages ? ", which lie in pages" : "");
  TESSERA_CHECK(s.kv_heads > 0 && s.heads % s.kv_heads == 0, s.heads, " query heads cannot share ",
                s.kv_heads, " KV heads");
  TESSERA_CHECK(q.dtype() == k.dtype() && q.dtype() == v.dtype(), "q, k and v need one dtype");
  detail::check_float(q.dtype(), "q, k and v");
  s.dtype = q.dtype();
  s.o_stride = {s.batch * s.heads * s.head_dim, s.heads * s.head_dim, s.head_dim};
}

kernels::AttentionShape describe(const ExecCtx& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const AttentionOptions& options) {
  kernels::AttentionShape s;
  describe_operands(s, q, k, v, options);
  s.scale = options.scale != 0.0f ? options.scale : 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  s.causal = options.causal;
  s.query_offset = options.query_offset;
  TESSERA_CHECK(options.window >= 0 && options.softcap >= 0.0f, "attention with a window of ", options.window,
                " keys and scores capped at ", options.softcap);
  // A window that hides no key is none.
  s.window = options.window < s.seq_q + s.query_offset ? options.window : 0;
  s.softcap = options.softcap;
  if (options.alibi_slopes) {
    TESSERA_CHECK(s.softcap == 0.0f, "attention caps no scores that have an ALiBi bias");
    TESSERA_CHECK(options.alibi_slopes.shape() == Shape{s.heads}, "one ALiBi slope per head");
    s.alibi_slopes = options.alibi_slopes.data<float>();
  }
  if (options.bias) {
    TESSERA_CHECK(options.bias.shape() == (Shape{s.seq_q + s.seq_k - 1, s.heads}) &&
                      options.bias.is_contiguous() && options.bias.dtype() == DType::f32,
                  "a bias by distance of ", s.seq_q, " queries and ", s.seq_k, " keys is fp32 ",
                  Shape{s.seq_q + s.seq_k - 1, s.heads}, ", not ", options.bias.shape());
    TESSERA_CHECK(options.query_offset == 0 && !options.alibi_slopes && s.softcap == 0.0f,
                  "a bias by distance goes with no query_offset, no ALiBi and no cap of scores");
    s.bias = options.bias.data<float>();
  }
  s.key_begin = ints(options.key_begin, {s.batch}, "key_begin");
  s.key_end = ints(options.key_end, {s.batch}, "key_end");
  s.document = ints(options.document, {s.batch, s.seq_k}, "document");
  s.dropout = options.dropout;
  s.dropout_key = options.dropout_key;
  s.sample0 = options.sample0;
  s.head0 = options.head0;
  s.total_heads = options.total_heads > 0 ? options.total_heads : s.heads;
  TESSERA_CHECK(s.head0 >= 0 && s.head0 + s.heads <= s.total_heads, "heads ", s.head0, " to ",
                s.head0 + s.heads, " of ", s.total_heads);
  s.seq_length = options.seq_length > 0 ? options.seq_length : s.seq_k;
  s.deterministic = ctx.deterministic;
  // Single queries have a kernel of their own, and so have those that follow a cache.
  s.fast_only = ctx.require_fast_attention && s.seq_q > 1 && (s.query_offset == 0 || !options.pages);
  return s;
}

}  // namespace

AttentionResult attention(const ExecCtx& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                          const AttentionOptions& options, const Tensor& into) {
  const kernels::AttentionShape shape = describe(ctx, q, k, v, options);
  TESSERA_CHECK(!into || (into.shape() == q.shape() && into.dtype() == q.dtype() && into.is_contiguous()),
                "memory for the result of attention is contiguous and like q, ", q.shape());
  AttentionResult result{into ? into : Tensor::empty(ctx, q.shape(), q.dtype()),
                         Tensor::empty(ctx, {shape.batch, shape.heads, shape.seq_q}, DType::f32)};
  const auto bytes = ctx.device().is_cuda()
                         ? kernels::cuda::attention_forward_workspace(shape, 0)
                         : kernels::cpu::attention_forward_workspace(shape, ctx.stream->threads());
  const Tensor workspace = Tensor::empty(ctx, {static_cast<std::int64_t>(bytes)}, DType::u8);
  const kernels::AttentionForward params{
      shape, q.raw(), k.raw(), v.raw(), result.o.raw(), result.lse.data<float>(), workspace.raw()};
  TESSERA_DISPATCH(ctx, attention_forward, params);
  return result;
}

void attention_backward(const ExecCtx& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const AttentionResult& saved, const Tensor& d_o, const AttentionOptions& options,
                        const AttentionGrads& grads) {
  TESSERA_CHECK(!options.pages, "attention to keys in pages has no backward: text is generated without one");
  const kernels::AttentionShape shape = describe(ctx, q, k, v, options);
  detail::check_contiguous(d_o, "d_o");
  TESSERA_CHECK(d_o.numel() == saved.o.numel() && d_o.dtype() == saved.o.dtype(), "d_o must be like o");
  const Tensor* pairs[][2] = {{&grads.dq, &q}, {&grads.dk, &k}, {&grads.dv, &v}};
  for (const auto& [grad, value] : pairs) {
    TESSERA_CHECK(grad->shape() == value->shape() && grad->strides() == value->strides() &&
                      grad->dtype() == value->dtype(),
                  "gradients of q, k, v must be laid out like q, k, v");
  }
  TESSERA_CHECK(!options.bias || (grads.dbias.shape() == options.bias.shape() &&
                                  grads.dbias.is_contiguous() && grads.dbias.dtype() == DType::f32),
                "the gradient of a bias is like the bias");
  float* const dbias = options.bias ? grads.dbias.data<float>() : nullptr;
  const auto bytes = ctx.device().is_cuda()
                         ? kernels::cuda::attention_backward_workspace(shape, 0)
                         : kernels::cpu::attention_backward_workspace(shape, ctx.stream->threads());
  const Tensor workspace = Tensor::empty(ctx, {static_cast<std::int64_t>(bytes)}, DType::u8);
  const kernels::AttentionBackward params{
      shape,     q.raw(),        k.raw(),        v.raw(),        saved.o.raw(),   saved.lse.data<float>(),
      d_o.raw(), grads.dq.raw(), grads.dk.raw(), grads.dv.raw(), workspace.raw(), dbias};
  TESSERA_DISPATCH(ctx, attention_backward, params);
}

}  // namespace tessera::ops
