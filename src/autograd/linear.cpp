#include "autograd/linear_weights.hpp"
#include "tessera/autograd/functions.hpp"

namespace tessera {
namespace {

class Linear final : public Function {
 public:
  Linear(const Var& x, Parameter& weight, Parameter* bias)
      : x_shape_(x.value().shape()), x_grad_(x.requires_grad()), weights_{weight, bias} {
    if (weight.trained()) x_ = SavedInput(x);
  }
  const char* name() const override { return "linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ = std::move(grads[0]);
    Tensor dx;
    if (x_grad_) {
      dx = ops::linear_backward_input(ctx, dy_, weights_.weight.value());
      if (dx.shape() != x_shape_) dx = dx.view(x_shape_);
    }
    return {std::move(dx)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    weights_.add_gradients(ctx, dy_, [&] { return x_.get(ctx); });
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  SavedInput x_;
  Tensor dy_;
  Shape x_shape_;
  bool x_grad_;
  detail::LinearWeights weights_;
};

Var record_linear(const Var& x, Tensor y, Parameter& weight, Parameter* bias) {
  return record({x}, std::move(y), [&] { return std::make_unique<Linear>(x, weight, bias); });
}

}  // namespace

Var linear(const ExecCtx& ctx, const Var& x, Parameter& weight, Parameter* bias, std::int64_t row_padding) {
  Tensor y = ops::linear(ctx, x.value(), weight.value(), bias ? bias->value() : Tensor(), row_padding);
  return record_linear(x, std::move(y), weight, bias);
}

LinearActivation linear_with_activation(const ExecCtx& ctx, const Var& x, Parameter& weight, Parameter* bias,
                                        ops::ActivationKind kind) {
  const bool recorded = x.tape() != nullptr;
  ops::LinearActivation result = ops::linear_with_activation(ctx, x.value(), weight.value(),
                                                             bias ? bias->value() : Tensor(), kind, recorded);
  return {record_linear(x, std::move(result.pre), weight, bias), std::move(result.y)};
}

}  // namespace tessera
