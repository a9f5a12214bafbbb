#include <algorithm>

#include "autograd/linear_weights.hpp"
#include "tessera/autograd/functions.hpp"
#include "tessera/ops/cross_entropy.hpp"
#include "tessera/ops/gemm.hpp"

namespace tessera {
namespace {

/// Rows of logits that exist at a time. Fewer save memory, but every chunk reads and writes the weight
/// gradient once.
constexpr std::int64_t kChunkRows = 512;

class LinearCrossEntropy final : public Function {
 public:
  LinearCrossEntropy(Tensor dx, Tensor upstream, const detail::LinearWeights& weights)
      : dx_(std::move(dx)), upstream_(std::move(upstream)), weights_(weights) {}
  const char* name() const override { return "linear_cross_entropy"; }

  Tensors backward_input(const ExecCtx&, Tensors grads) override {
    TESSERA_CHECK(grads[0].raw() == upstream_.raw(),
                  "linear_cross_entropy was told another upstream gradient than it is given");
    return {std::move(dx_)};
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  Tensor dx_, upstream_;
  detail::LinearWeights weights_;
};

}  // namespace

Var linear_cross_entropy(const ExecCtx& ctx, const Var& x_var, Parameter& weight, const Tensor& labels,
                         const Tensor& upstream, Parameter* bias) {
  const bool recorded = x_var.tape() != nullptr;
  if (recorded && !upstream)
    return cross_entropy(ctx, linear(ctx, x_var, weight, bias, kHeadRowPadding), labels);
  const Tensor x = x_var.value().view({-1, x_var.value().size(-1)});
  const std::int64_t rows = x.size(0);
  const detail::LinearWeights weights{weight, bias};
  TESSERA_CHECK_EQ(labels.numel(), rows, "one label per row");
  TESSERA_CHECK(!recorded || upstream.numel() == rows, "one upstream gradient per row");
  Tensor loss = Tensor::empty(ctx, {rows}, DType::f32);
  const Tensor dx = recorded && x_var.requires_grad() ? Tensor::empty(ctx, x.shape(), x.dtype()) : Tensor();
  for (std::int64_t first = 0; first < rows; first += kChunkRows) {
    const std::int64_t count = std::min(kChunkRows, rows - first);
    const Tensor chunk = x.narrow(0, first, count), chunk_labels = labels.narrow(0, first, count);
    const Tensor logits =
        ops::linear(ctx, chunk, weight.value(), bias ? bias->value() : Tensor(), kHeadRowPadding);
    const Tensor lse = ops::cross_entropy_into(ctx, logits, chunk_labels, loss.narrow(0, first, count));
    if (!recorded) continue;
    ops::cross_entropy_backward_in_place(ctx, logits, chunk_labels, lse, upstream.narrow(0, first, count));
    if (dx) ops::matmul_into(ctx, logits, weight.value(), dx.narrow(0, first, count), 0.0f, false, false);
    weights.add_gradients(ctx, logits, [&] { return chunk; });
  }
  return record({x_var}, std::move(loss), [&] {
    return std::make_unique<LinearCrossEntropy>(dx ? dx.view(x_var.value().shape()) : Tensor(), upstream,
                                                weights);
  });
}

}  // namespace tessera
