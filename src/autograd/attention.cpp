#include "autograd/packed_heads.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

using detail::Heads;
using detail::rotate;
using detail::split_kv;
using detail::split_qkv;

/// Memory for the gradient of the bias; undefined without one.
Tensor like_bias(const ExecCtx& ctx, const SelfAttentionOptions& o) {
  return o.attention.bias ? Tensor::empty(ctx, o.attention.bias.shape(), DType::f32) : Tensor();
}

class SelfAttention final : public Function {
 public:
  SelfAttention(Tensor qkv, ops::AttentionResult result, SelfAttentionOptions options)
      : qkv_(std::move(qkv)), result_(std::move(result)), options_(std::move(options)) {}
  const char* name() const override { return "self_attention"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    const Tensor d_o = grads[0].view(result_.o.shape());
    Tensor dqkv = Tensor::empty(ctx, qkv_.shape(), qkv_.dtype());
    const Heads value = split_qkv(qkv_, options_);
    const Heads grad = split_qkv(dqkv, options_);
    Tensor dbias = like_bias(ctx, options_);
    ops::attention_backward(ctx, value.q, value.k, value.v, result_, d_o, options_.attention,
                            {grad.q, grad.k, grad.v, dbias});
    rotate(ctx, dqkv, options_, true);
    return {std::move(dqkv), std::move(dbias)};
  }

 private:
  Tensor qkv_;  // after rotation
  ops::AttentionResult result_;
  SelfAttentionOptions options_;
};

class CrossAttention final : public Function {
 public:
  CrossAttention(Tensor q, Tensor kv, ops::AttentionResult result, SelfAttentionOptions options)
      : q_(std::move(q)), kv_(std::move(kv)), result_(std::move(result)), options_(std::move(options)) {}
  const char* name() const override { return "cross_attention"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    const Tensor d_o = grads[0].view(result_.o.shape());
    Tensor dq = Tensor::empty(ctx, q_.shape(), q_.dtype()),
           dkv = Tensor::empty(ctx, kv_.shape(), kv_.dtype());
    const auto [k, v] = split_kv(kv_, options_);
    const auto [dk, dv] = split_kv(dkv, options_);
    ops::attention_backward(ctx, q_.view(result_.o.shape()), k, v, result_, d_o, options_.attention,
                            {dq.view(result_.o.shape()), dk, dv});
    return {std::move(dq), std::move(dkv)};
  }

 private:
  Tensor q_, kv_;
  ops::AttentionResult result_;
  SelfAttentionOptions options_;
};

}  // namespace

Tensor detail::take_rotated(const ExecCtx& ctx, Var& qkv, const SelfAttentionOptions& o) {
  Tensor value = qkv.take();
  TESSERA_CHECK(value.rank() == 3 && value.size(2) == (o.heads + 2 * o.kv_heads) * o.head_dim,
                "packed qkv of shape ", value.shape(), " for ", o.heads, " + 2 x ", o.kv_heads, " heads of ",
                o.head_dim);
  if (o.rope != nullptr) {
    if (!value.is_unique()) value = ops::contiguous(ctx, value);
    rotate(ctx, value, o, false);
  }
  return value;
}

Var cross_attention(const ExecCtx& ctx, const Var& q, const Var& kv, const SelfAttentionOptions& options) {
  const Tensor& x = q.value();
  TESSERA_CHECK(x.rank() == 3 && x.size(2) == options.heads * options.head_dim && kv.value().rank() == 3 &&
                    kv.value().size(2) == 2 * options.kv_heads * options.head_dim,
                "q of shape ", x.shape(), " and kv of shape ", kv.value().shape(), " for ", options.heads,
                " and 2 x ", options.kv_heads, " heads of ", options.head_dim);
  TESSERA_CHECK(options.rope == nullptr && !options.attention.bias,
                "attention over another sequence knows no distances");
  const auto [k, v] = split_kv(kv.value(), options);
  ops::AttentionResult result = ops::attention(
      ctx, x.view({x.size(0), x.size(1), options.heads, options.head_dim}), k, v, options.attention);
  Tensor o = result.o.view(x.shape());
  return record({q, kv}, std::move(o),
                [&] { return std::make_unique<CrossAttention>(x, kv.value(), std::move(result), options); });
}

Var self_attention(const ExecCtx& ctx, Var qkv, const SelfAttentionOptions& given, const Var& bias) {
  SelfAttentionOptions options = given;
  options.attention.bias = bias.value();
  Tensor value = detail::take_rotated(ctx, qkv, options);
  const Heads heads = split_qkv(value, options);
  ops::AttentionResult result = ops::attention(ctx, heads.q, heads.k, heads.v, options.attention);
  Tensor o = result.o.view({value.size(0), value.size(1), options.heads * options.head_dim});
  return record({qkv, bias}, std::move(o), [&] {
    return std::make_unique<SelfAttention>(std::move(value), std::move(result), std::move(options));
  });
}

}  // namespace tessera
