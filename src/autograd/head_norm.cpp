#include "tessera/autograd/functions.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

/// Heads [first, first + count) of a packed qkv, and the weight that they have in common.
struct HeadRun {
  std::int64_t first = 0, count = 0;
  Parameter* weight = nullptr;
  ops::AddNorm saved = {};
  Tensor dy = {};
};

Tensor heads_of(const Tensor& qkv, std::int64_t head_dim, const HeadRun& part) {
  const Tensor heads = qkv.view({qkv.size(0), qkv.size(1), qkv.size(2) / head_dim, head_dim});
  return heads.narrow(2, part.first, part.count);
}

class HeadNorm final : public Function {
 public:
  HeadNorm(std::vector<HeadRun> parts, std::int64_t head_dim, const ops::NormOptions& options)
      : parts_(std::move(parts)), head_dim_(head_dim), options_(options) {}
  const char* name() const override { return "head_norm"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    Tensor dqkv = grads[0].is_unique() ? std::move(grads[0]) : ops::contiguous(ctx, grads[0]);
    for (HeadRun& part : parts_) {
      const Tensor place = heads_of(dqkv, head_dim_, part);
      part.dy = ops::contiguous(ctx, place);
      const ops::AddNormGrad grad =
          ops::add_norm_backward(ctx, part.saved, part.weight->main(), part.dy, Tensor(), false, options_);
      ops::copy(ctx, grad.residual, place);
    }
    return {std::move(dqkv)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    for (HeadRun& part : parts_) {
      if (!part.weight->trained()) continue;
      const float beta = part.weight->next_beta();
      ops::norm_weight_grad(ctx, part.saved, part.dy, part.weight->grad(), Tensor(), beta, options_);
    }
  }
  std::vector<Parameter*> parameters() const override {
    std::vector<Parameter*> list;
    for (const HeadRun& part : parts_) {
      if (part.weight->trained()) list.push_back(part.weight);
    }
    return list;
  }

 private:
  std::vector<HeadRun> parts_;
  std::int64_t head_dim_;
  ops::NormOptions options_;
};

}  // namespace

Var head_norm(const ExecCtx& ctx, Var qkv, const HeadNormOptions& options) {
  Tensor value = qkv.take();
  TESSERA_CHECK(
      value.rank() == 3 && value.size(2) == (options.heads + 2 * options.kv_heads) * options.head_dim,
      "packed qkv of shape ", value.shape(), " for ", options.heads, " + 2 x ", options.kv_heads,
      " heads of ", options.head_dim);
  if (!value.is_unique()) value = ops::contiguous(ctx, value);
  const ops::NormOptions norm{
      .rms = true, .eps = options.eps, .out = value.dtype(), .zero_centered = options.zero_centered};
  std::vector<HeadRun> parts = {{0, options.heads, &options.query_weight},
                                {options.heads, options.kv_heads, &options.key_weight}};
  for (HeadRun& part : parts) {
    const Tensor place = heads_of(value, options.head_dim, part);
    part.saved =
        ops::add_norm(ctx, ops::contiguous(ctx, place), Tensor(), part.weight->main(), Tensor(), norm);
    ops::copy(ctx, part.saved.y, place);
    part.saved.y = Tensor();
  }
  return record({qkv}, std::move(value),
                [&] { return std::make_unique<HeadNorm>(std::move(parts), options.head_dim, norm); });
}

}  // namespace tessera
