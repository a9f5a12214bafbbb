#include "autograd/linear_weights.hpp"
#include "parallel/arriving.hpp"

namespace tessera {
namespace {

/// What happens to the input before the product.
struct Prologue {
  enum class Kind { none, activation, swiglu };
  Kind kind = Kind::none;
  ops::ActivationKind activation = ops::ActivationKind::gelu_tanh;

  Tensor forward(const ExecCtx& ctx, const Tensor& x) const {
    if (kind == Kind::none) return x;
    return kind == Kind::activation ? ops::activation(ctx, x, activation) : ops::swiglu(ctx, x);
  }
};

class RowLinear final : public Function {
 public:
  RowLinear(const TensorParallel& tp, const Var& x, const Prologue& prologue, Parameter& weight,
            Parameter* bias)
      : tp_(tp), x_(x), x_grad_(x.requires_grad()), prologue_(prologue), weights_{weight, bias} {}
  const char* name() const override { return "row_linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ =
        tp_.sharded_sequence() ? detail::gather_positions(ctx, tp_, grads[0]).take(ctx) : std::move(grads[0]);
    if (!x_grad_) return {Tensor()};
    Tensor da = ops::linear_backward_input(ctx, dy_, weights_.weight.value());
    switch (prologue_.kind) {
      case Prologue::Kind::none:
        break;
      case Prologue::Kind::activation:
        return {ops::activation_backward(ctx, x_.get(ctx), da, prologue_.activation)};
      case Prologue::Kind::swiglu:
        return {ops::swiglu_backward(ctx, x_.get(ctx), da)};
    }
    return {std::move(da)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    weights_.add_gradients(ctx, dy_, [&] { return prologue_.forward(ctx, x_.get(ctx)); });
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  TensorParallel tp_;
  SavedInput x_;
  bool x_grad_;
  Prologue prologue_;
  detail::LinearWeights weights_;
  Tensor dy_;  // of all positions
};

Var run(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, const Prologue& prologue,
        Parameter& weight, Parameter* bias) {
  // One rank adds the bias, so that the sum has it once.
  const Tensor bias_value = bias ? bias->value() : Tensor();
  Tensor part = ops::linear(ctx, prologue.forward(ctx, x.value()), weight.value(),
                            tp.rank() == 0 ? bias_value : Tensor());
  Tensor y = detail::sum_partial(ctx, tp, std::move(part)).take(ctx);
  return record({x}, std::move(y),
                [&] { return std::make_unique<RowLinear>(tp, x, prologue, weight, bias); });
}

}  // namespace

Var row_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
               Parameter* bias) {
  if (!tp.active()) return linear(ctx, x, weight, bias);
  return run(ctx, tp, x, {}, weight, bias);
}

Var activated_row_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x,
                         std::optional<ops::ActivationKind> kind, Parameter& weight, Parameter* bias) {
  if (!tp.active()) return activated_linear(ctx, x, kind, weight, bias);
  Prologue prologue{Prologue::Kind::swiglu};
  if (kind) prologue = {Prologue::Kind::activation, *kind};
  return run(ctx, tp, x, prologue, weight, bias);
}

}  // namespace tessera
