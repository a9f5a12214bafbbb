#include "tessera/ops/elementwise.hpp"

#include "tessera/autograd/functions.hpp"

namespace tessera {
namespace {

/// q, k and v as [seq, batch, heads, head_dim] views of a packed qkv.
struct Heads {
  Tensor q, k, v;
};

Heads split(const Tensor& qkv, const SelfAttentionOptions& o) {
  const Tensor heads = qkv.view({qkv.size(0), qkv.size(1), o.heads + 2 * o.kv_heads, o.head_dim});
  return {heads.narrow(2, 0, o.heads), heads.narrow(2, o.heads, o.kv_heads),
          heads.narrow(2, o.heads + o.kv_heads, o.kv_heads)};
}

/// q and k heads lie next to each other: one rotation serves both.
void rotate(const ExecCtx& ctx, const Tensor& qkv, const SelfAttentionOptions& o, bool inverse) {
  if (o.rope == nullptr) return;
  const Tensor heads = qkv.view({qkv.size(0), qkv.size(1), o.heads + 2 * o.kv_heads, o.head_dim});
  ops::rope_in_place(ctx, heads.narrow(2, 0, o.heads + o.kv_heads), o.positions, *o.rope, inverse);
}

class SelfAttention final : public Function {
 public:
  SelfAttention(Tensor qkv, ops::AttentionResult result, const SelfAttentionOptions& options)
      : qkv_(std::move(qkv)), result_(std::move(result)), options_(options) {}
  const char* name() const override { return "self_attention"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    const Tensor d_o = grads[0].view(result_.o.shape());
    Tensor dqkv = Tensor::empty(ctx, qkv_.shape(), qkv_.dtype());
    const Heads value = split(qkv_, options_);
    const Heads grad = split(dqkv, options_);
    ops::attention_backward(ctx, value.q, value.k, value.v, result_, d_o, options_.attention,
                            {grad.q, grad.k, grad.v});
    rotate(ctx, dqkv, options_, true);
    return {std::move(dqkv)};
  }

 private:
  Tensor qkv_;  // after rotation
  ops::AttentionResult result_;
  SelfAttentionOptions options_;
};

}  // namespace

Var self_attention(const ExecCtx& ctx, Var qkv, const SelfAttentionOptions& options) {
  Tensor value = qkv.take();
  TESSERA_CHECK(
      value.rank() == 3 && value.size(2) == (options.heads + 2 * options.kv_heads) * options.head_dim,
      "packed qkv of shape ", value.shape(), " for ", options.heads, " + 2 x ", options.kv_heads,
      " heads of ", options.head_dim);
  if (options.rope != nullptr) {
    if (!value.is_unique()) value = ops::contiguous(ctx, value);
    rotate(ctx, value, options, false);
  }
  const Heads heads = split(value, options);
  ops::AttentionResult result = ops::attention(ctx, heads.q, heads.k, heads.v, options.attention);
  Tensor o = result.o.view({value.size(0), value.size(1), options.heads * options.head_dim});
  return record({qkv}, std::move(o), [&] {
    return std::make_unique<SelfAttention>(std::move(value), std::move(result), options);
  });
}

}  // namespace tessera
