#pragma once
/// A transformer block over the autograd functions, dropout everywhere: what recomputation is tested on.

#include "tessera/parallel/functions.hpp"
#include "tests/support/gradcheck.hpp"

namespace tessera::test {

/// As make_parameter, with the copy that linears read in `compute`.
inline std::unique_ptr<Parameter> make_weight(const ExecCtx& ctx, const std::string& name, const Shape& shape,
                                              unsigned seed, DType compute) {
  auto parameter = std::make_unique<Parameter>(name, shape, Init::zeros());
  const Tensor main = random_tensor(ctx, shape, seed, 0.4f);
  const Tensor grad = Tensor::empty(ctx, shape, DType::f32);
  if (compute == DType::f32) {
    parameter->bind(main, grad);
  } else {
    parameter->bind(ops::cast(ctx, main, compute), grad, main);
  }
  return parameter;
}

struct BlockSizes {
  std::int64_t seq = 5, batch = 3, heads = 2, kv_heads = 1, head_dim = 6, ffn = 20;
  DType compute = DType::f32;
  float dropout = 0.3f;
  bool forget = false;

  std::int64_t width() const { return heads * head_dim; }
  std::int64_t rows() const { return seq * batch; }
  Shape stream() const { return {seq, batch, width()}; }
};

/// The residual stream and what is yet to be added to it.
struct Stream {
  Var residual, branch;
};

class Block {
 public:
  Block(const ExecCtx& ctx, const std::string& name, const BlockSizes& sizes, unsigned seed)
      : sizes_(sizes), name_(name) {
    const auto make = [&](const std::string& part, const Shape& shape, DType compute) {
      weights_.push_back(make_weight(ctx, name + "." + part, shape, seed++, compute));
    };
    const std::int64_t c = sizes.width(), qkv = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim;
    make("norm1.weight", {c}, DType::f32);
    make("norm1.bias", {c}, DType::f32);
    make("qkv.weight", {qkv, c}, sizes.compute);
    make("qkv.bias", {qkv}, sizes.compute);
    make("proj.weight", {c, c}, sizes.compute);
    make("norm2.weight", {c}, DType::f32);
    make("norm2.bias", {c}, DType::f32);
    make("fc1.weight", {sizes.ffn, c}, sizes.compute);
    make("fc2.weight", {c, sizes.ffn}, sizes.compute);
    make("fc2.bias", {c}, sizes.compute);
  }

  Stream forward(const ExecCtx& ctx, const Stream& in) const {
    const ops::NormOptions norm{.rms = false, .eps = 1e-5f, .out = sizes_.compute};
    const auto weight = [&](std::size_t i) -> Parameter& { return *weights_[i]; };
    SelfAttentionOptions attention;
    attention.heads = sizes_.heads;
    attention.kv_heads = sizes_.kv_heads;
    attention.head_dim = sizes_.head_dim;
    attention.attention.dropout = sizes_.dropout;
    attention.attention.dropout_key = {7, site_of(name_ + ".attention"), 2};
    const ResidualNorm first =
        add_norm(ctx, in.residual, in.branch, weight(0), &weight(1), norm, drop("in"), sizes_.forget);
    Var o = self_attention(ctx, linear(ctx, first.y, weight(2), &weight(3)), attention);
    o = linear(ctx, o, weight(4), nullptr);
    const ResidualNorm second =
        add_norm(ctx, first.residual, o, weight(5), &weight(6), norm, drop("mid"), sizes_.forget);
    const auto gelu = ops::ActivationKind::gelu_tanh;
    const LinearActivation h = column_linear_with_activation(ctx, {}, second.y, weight(7), nullptr, gelu);
    return {second.residual, activated_row_linear(ctx, {}, h.pre, gelu, weight(8), &weight(9), h.y)};
  }

  std::vector<Parameter*> parameters() const {
    std::vector<Parameter*> list;
    for (const auto& weight : weights_) list.push_back(weight.get());
    return list;
  }

 private:
  DropoutSpec drop(const std::string& site) const {
    return {.key = {7, site_of(name_ + "." + site), 2},
            .probability = sizes_.dropout,
            .batch = sizes_.batch,
            .sample0 = 0,
            .position0 = 0,
            .seq_length = sizes_.seq};
  }

  BlockSizes sizes_;
  std::string name_;
  std::vector<std::unique_ptr<Parameter>> weights_;
};

}  // namespace tessera::test
