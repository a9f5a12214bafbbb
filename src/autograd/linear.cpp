#include "tessera/autograd/functions.hpp"
#include "tessera/ops/gemm.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
namespace {

class Linear final : public Function {
 public:
  Linear(Tensor x, bool x_grad, Parameter& weight, Parameter* bias)
      : x_(std::move(x)), x_grad_(x_grad), weight_(weight), bias_(bias) {}
  const char* name() const override { return "linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ = std::move(grads[0]);
    Tensor dx;
    if (x_grad_) {
      dx = ops::linear_backward_input(ctx, dy_, weight_.value());
      if (dx.shape() != x_.shape()) dx = dx.view(x_.shape());
    }
    return {std::move(dx)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    if (weight_.trained()) ops::linear_backward_weight(ctx, dy_, x_, weight_.grad(), weight_.next_beta());
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
  bool x_grad_;
  Parameter& weight_;
  Parameter* bias_;
};

}  // namespace

Var linear(const ExecCtx& ctx, const Var& x, Parameter& weight, Parameter* bias, std::int64_t row_padding) {
  Tensor y = ops::linear(ctx, x.value(), weight.value(), bias ? bias->value() : Tensor(), row_padding);
  return record({x}, std::move(y),
                [&] { return std::make_unique<Linear>(x.value(), x.requires_grad(), weight, bias); });
}

}  // namespace tessera
