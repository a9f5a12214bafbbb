#include "autograd/linear_weights.hpp"
#include "tessera/autograd/functions.hpp"

namespace tessera {
namespace {

using Kind = ops::ActivationKind;

class ActivatedLinear final : public Function {
 public:
  ActivatedLinear(const Var& x, Kind kind, Parameter& weight, Parameter* bias)
      : x_(x), kind_(kind), weights_{weight, bias} {}
  const char* name() const override { return "activated_linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ = std::move(grads[0]);
    const Tensor weight = weights_.weight.value();
    if (!ops::is_gated(kind_)) return {ops::linear_backward_input(ctx, dy_, weight, x_.get(ctx), kind_)};
    const Tensor da = ops::linear_backward_input(ctx, dy_, weight);
    return {ops::activation_backward(ctx, x_.get(ctx), da, kind_)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    weights_.add_gradients(ctx, dy_, [&] { return ops::activation(ctx, x_.get(ctx), kind_); });
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  SavedInput x_;
  Tensor dy_;
  Kind kind_;
  detail::LinearWeights weights_;
};

}  // namespace

Var activated_linear(const ExecCtx& ctx, const Var& x, Kind kind, Parameter& weight, Parameter* bias,
                     const Tensor& activated) {
  Tensor y = ops::linear(ctx, activated ? activated : ops::activation(ctx, x.value(), kind), weight.value(),
                         bias ? bias->value() : Tensor());
  return record({x}, std::move(y), [&] { return std::make_unique<ActivatedLinear>(x, kind, weight, bias); });
}

}  // namespace tessera
