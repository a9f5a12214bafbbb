#include "autograd/linear_weights.hpp"
#include "parallel/arriving.hpp"

namespace tessera {
namespace {

class ColumnLinear final : public Function {
 public:
  ColumnLinear(const TensorParallel& tp, const Var& x, Parameter& weight, Parameter* bias)
      : tp_(tp), x_(x), x_shape_(x.value().shape()), x_grad_(x.requires_grad()), weights_{weight, bias} {}
  const char* name() const override { return "column_linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ = std::move(grads[0]);
    return {start_input_gradient(ctx, dy_).take(ctx)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    weights_.add_gradients(
        ctx, dy_, [&] { return tp_.sharded_sequence() ? gather_input(ctx).take(ctx) : x_.get(ctx); });
  }

  /// The input travels during the product that makes dx, dx during the one that makes the weight gradient.
  Tensors backward(const ExecCtx& ctx, Tensors grads) override {
    const Tensor dy = std::move(grads[0]);
    const bool gathers = tp_.sharded_sequence() && weights_.weight.trained();
    detail::Arriving x = gathers ? gather_input(ctx) : detail::Arriving();
    detail::Arriving dx = start_input_gradient(ctx, dy);
    weights_.add_gradients(ctx, dy, [&] { return gathers ? x.take(ctx) : x_.get(ctx); });
    return {dx.take(ctx)};
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  detail::Arriving gather_input(const ExecCtx& ctx) const {
    return detail::gather_positions(ctx, tp_, x_.get(ctx));
  }

  detail::Arriving start_input_gradient(const ExecCtx& ctx, const Tensor& dy) const {
    if (!x_grad_) return {};
    Tensor dx = ops::linear_backward_input(ctx, dy, weights_.weight.value());
    Shape whole = x_shape_;
    if (tp_.sharded_sequence()) whole[0] *= tp_.size();
    // Rows of y that were padded made it a matrix.
    if (dx.shape() != whole) dx = dx.view(whole);
    return detail::sum_partial(ctx, tp_, std::move(dx));
  }

  TensorParallel tp_;
  SavedInput x_;  // with sequence parallelism own positions only
  Shape x_shape_;
  bool x_grad_;
  detail::LinearWeights weights_;
  Tensor dy_;
};

}  // namespace

Var column_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                  Parameter* bias, std::int64_t row_padding) {
  if (!tp.active()) return linear(ctx, x, weight, bias, row_padding);
  const Tensor whole =
      tp.sharded_sequence() ? detail::gather_positions(ctx, tp, x.value()).take(ctx) : x.value();
  Tensor y = ops::linear(ctx, whole, weight.value(), bias ? bias->value() : Tensor(), row_padding);
  return record({x}, std::move(y), [&] { return std::make_unique<ColumnLinear>(tp, x, weight, bias); });
}

}  // namespace tessera
