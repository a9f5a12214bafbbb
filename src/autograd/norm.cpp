#include "tessera/autograd/functions.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

class AddNormFunction final : public Function {
 public:
  AddNormFunction(ops::AddNorm saved, bool has_branch, Parameter& weight, Parameter* bias,
                  const ops::NormOptions& options, const DropoutSpec& dropout)
      : saved_(std::move(saved)),
        has_branch_(has_branch),
        weight_(weight),
        bias_(bias),
        options_(options),
        dropout_(dropout) {
    saved_.y = Tensor();  // backward needs the sum and its statistics, not the result
  }
  const char* name() const override { return "add_norm"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ = std::move(grads[1]);
    if (!dy_) return {grads[0], has_branch_ ? branch_of(ctx, grads[0]) : Tensor()};
    Tensor dresidual = std::move(grads[0]);
    ops::AddNormGrad grad =
        ops::add_norm_backward(ctx, saved_, weight_.main(), dy_, dresidual, has_branch_, options_, dropout_);
    return {std::move(grad.residual), std::move(grad.branch)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    if (!dy_ || parameters().empty()) return;
    const ops::NormWeightSums sums = next_sums(ctx);
    ops::norm_weight_grad(ctx, saved_, dy_, sums.dweight, sums.dbias, sums.beta, options_);
  }

  Tensors backward(const ExecCtx& ctx, Tensors grads) override {
    if (!grads[1] || parameters().empty()) return backward_input(ctx, std::move(grads));
    Tensor dresidual = std::move(grads[0]);
    ops::AddNormGrad grad = ops::add_norm_gradients(ctx, saved_, weight_.main(), grads[1], dresidual,
                                                    has_branch_, next_sums(ctx), options_, dropout_);
    return {std::move(grad.residual), std::move(grad.branch)};
  }

  std::vector<Parameter*> parameters() const override {
    std::vector<Parameter*> list;
    if (weight_.trained()) list.push_back(&weight_);
    if (bias_ && bias_->trained()) list.push_back(bias_);
    return list;
  }

 private:
  /// The gradients of weight and bias. One pass writes both, so always with the same beta; that of one which
  /// is not trained goes nowhere.
  ops::NormWeightSums next_sums(const ExecCtx& ctx) const {
    float beta = 0;
    for (Parameter* parameter : parameters()) beta = parameter->next_beta();
    const auto sum_of = [&](const Parameter& parameter) {
      if (parameter.trained()) return parameter.grad();
      const Tensor unwanted = Tensor::empty(ctx, parameter.shape(), DType::f32);
      ops::fill_zero(ctx, unwanted);
      return unwanted;
    };
    return {sum_of(weight_), bias_ ? sum_of(*bias_) : Tensor(), beta};
  }
  /// The gradient of the branch when the norm itself was not used further on.
  Tensor branch_of(const ExecCtx& ctx, const Tensor& dresidual) const {
    Tensor branch = dresidual.dtype() == options_.out ? dresidual : ops::cast(ctx, dresidual, options_.out);
    return ops::dropout(ctx, branch, dropout_);
  }

  ops::AddNorm saved_;
  bool has_branch_;
  Parameter& weight_;
  Parameter* bias_;
  ops::NormOptions options_;
  DropoutSpec dropout_;
  Tensor dy_;
};

}  // namespace

ResidualNorm add_norm(const ExecCtx& ctx, const Var& residual, const Var& branch, Parameter& weight,
                      Parameter* bias, const ops::NormOptions& options, const DropoutSpec& dropout,
                      bool forget) {
  ops::AddNorm out = ops::add_norm(ctx, residual.value(), branch.value(), weight.main(),
                                   bias ? bias->main() : Tensor(), options, dropout);
  std::vector<Var> vars = record({residual, branch}, Tensors{out.residual, out.y}, [&] {
    return std::make_unique<AddNormFunction>(out, static_cast<bool>(branch), weight, bias, options, dropout);
  });
  ResidualNorm result{std::move(vars[0]), std::move(vars[1])};
  // Only what is recorded keeps the residual; without that a recipe would hold more than y.
  if (forget && result.y.requires_grad()) {
    out.y = Tensor();
    result.y.set_recipe([out, &weight, bias, options](const ExecCtx& c) {
      return ops::norm_again(c, out, weight.main(), bias ? bias->main() : Tensor(), options);
    });
  }
  return result;
}

}  // namespace tessera
