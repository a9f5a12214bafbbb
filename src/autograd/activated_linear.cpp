#include "tessera/autograd/functions.hpp"
#include "tessera/ops/gemm.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
namespace {

using Kind = std::optional<ops::ActivationKind>;

Tensor activate(const ExecCtx& ctx, const Tensor& x, const Kind& kind) {
  return kind ? ops::activation(ctx, x, *kind) : ops::swiglu(ctx, x);
}

class ActivatedLinear final : public Function {
 public:
  ActivatedLinear(Tensor x, const Kind& kind, Parameter& weight, Parameter* bias)
      : x_(std::move(x)), kind_(kind), weight_(weight), bias_(bias) {}
  const char* name() const override { return "activated_linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ = std::move(grads[0]);
    const Tensor da = ops::linear_backward_input(ctx, dy_, weight_.value());
    return {kind_ ? ops::activation_backward(ctx, x_, da, *kind_) : ops::swiglu_backward(ctx, x_, da)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    if (weight_.trained()) {
      ops::linear_backward_weight(ctx, dy_, activate(ctx, x_, kind_), weight_.grad(), weight_.next_beta());
    }
    if (bias_ && bias_->trained()) ops::column_sum(ctx, dy_, bias_->grad(), bias_->next_beta());
  }

  std::vector<Parameter*> parameters() const override {
    std::vector<Parameter*> list;
    if (weight_.trained()) list.push_back(&weight_);
    if (bias_ && bias_->trained()) list.push_back(bias_);
    return list;
  }

 private:
  Tensor x_, dy_;
  Kind kind_;
  Parameter& weight_;
  Parameter* bias_;
};

}  // namespace

Var activated_linear(const ExecCtx& ctx, const Var& x, Kind kind, Parameter& weight, Parameter* bias) {
  Tensor y =
      ops::linear(ctx, activate(ctx, x.value(), kind), weight.value(), bias ? bias->value() : Tensor());
  return record({x}, std::move(y),
                [&] { return std::make_unique<ActivatedLinear>(x.value(), kind, weight, bias); });
}

}  // namespace tessera
