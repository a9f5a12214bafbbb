#include "parallel/linear_weights.hpp"
#include "parallel/overlap.hpp"

namespace tessera {
namespace {

class ColumnLinear final : public Function {
 public:
  ColumnLinear(const TensorParallel& tp, const Var& x, Parameter& weight, Parameter* bias)
      : tp_(tp), x_shape_(x.value().shape()), x_grad_(x.requires_grad()), weights_{weight, bias} {
    if (weight.trained()) x_ = SavedInput(x);
  }
  const char* name() const override { return "column_linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    dy_ = std::move(grads[0]);
    return {start_input_gradient(ctx, dy_, false).take(ctx)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    weights_.add_gradients(
        ctx, dy_, [&] { return tp_.sharded_sequence() ? gather_input(ctx).take(ctx) : x_.get(ctx); });
  }

  /// The input travels during the product that makes dx, dx during the one that makes the weight gradient;
  /// without that one in pieces during the next piece's product.
  Tensors backward(const ExecCtx& ctx, Tensors grads) override {
    const Tensor dy = std::move(grads[0]);
    const bool gathers = tp_.sharded_sequence() && weights_.weight.trained();
    detail::Arriving x = gathers ? gather_input(ctx) : detail::Arriving();
    detail::ArrivingSum dx = start_input_gradient(ctx, dy, weights_.weight.trained());
    weights_.add_gradients(ctx, dy, [&] { return gathers ? x.take(ctx) : x_.get(ctx); });
    return {dx.take(ctx)};
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  detail::Arriving gather_input(const ExecCtx& ctx) const {
    return detail::gather_positions(ctx, tp_, x_.get(ctx));
  }

  /// `hidden`: another product follows, so the sum can travel in one piece.
  detail::ArrivingSum start_input_gradient(const ExecCtx& ctx, const Tensor& dy, bool hidden) const {
    if (!x_grad_) return {};
    Shape whole = x_shape_;
    if (tp_.sharded_sequence()) whole[0] *= tp_.size();
    const Tensor rows = detail::as_rows(dy), weight = weights_.weight.value();
    return detail::multiply_and_sum(
        ctx, tp_, whole, dy.dtype(), hidden ? 1 : detail::pieces_of_sum(tp_, whole),
        [&](const detail::Block& block, const Tensor& dx) {
          ops::matmul_into(ctx, rows.narrow(0, block.row, block.rows),
                           weight.narrow(1, block.col, block.cols), dx, 0.0f, false, false);
        });
  }

  TensorParallel tp_;
  SavedInput x_;  // with sequence parallelism own positions only
  Shape x_shape_;
  bool x_grad_;
  detail::LinearWeights weights_;
  Tensor dy_;
};

/// multiply(rows of x at all positions, number of the first): at once, or own positions while the others' are
/// on their way.
void multiply_input(const ExecCtx& ctx, const TensorParallel& tp, const Tensor& x, std::int64_t cols,
                    const detail::MultiplyRows& multiply) {
  if (!tp.sharded_sequence()) return multiply(detail::as_rows(x), 0);
  detail::gather_and_multiply(ctx, tp, x, cols, multiply);
}

/// Shape of x weight^T at all positions.
Shape result_shape(const TensorParallel& tp, const Tensor& x, const Tensor& weight) {
  Shape shape = x.shape();
  if (tp.sharded_sequence()) shape[0] *= tp.size();
  shape[-1] = weight.size(0);
  return shape;
}

Var record_column(const TensorParallel& tp, const Var& x, Tensor y, Parameter& weight, Parameter* bias) {
  return record({x}, std::move(y), [&] { return std::make_unique<ColumnLinear>(tp, x, weight, bias); });
}

}  // namespace

Var column_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                  Parameter* bias, std::int64_t row_padding) {
  const Tensor w = weight.value(), b = bias ? bias->value() : Tensor();
  Tensor y = ops::empty_linear(ctx, result_shape(tp, x.value(), w), x.value().dtype(), row_padding);
  const Tensor y_rows = detail::as_rows(y);
  multiply_input(ctx, tp, x.value(), w.size(0), [&](const Tensor& rows, std::int64_t first) {
    ops::linear_into(ctx, rows, w, b, y_rows.narrow(0, first, rows.size(0)));
  });
  return record_column(tp, x, std::move(y), weight, bias);
}

LinearActivation column_linear_with_activation(const ExecCtx& ctx, const TensorParallel& tp, const Var& x,
                                               Parameter& weight, Parameter* bias, ops::ActivationKind kind) {
  const Tensor w = weight.value(), b = bias ? bias->value() : Tensor();
  const Shape shape = result_shape(tp, x.value(), w);
  Tensor y = Tensor::empty(ctx, shape, x.value().dtype());
  Tensor pre = x.tape() != nullptr ? Tensor::empty(ctx, shape, y.dtype()) : Tensor();
  const Tensor pre_rows = pre ? detail::as_rows(pre) : pre, y_rows = detail::as_rows(y);
  multiply_input(ctx, tp, x.value(), w.size(0), [&](const Tensor& rows, std::int64_t first) {
    const auto part = [&](const Tensor& whole) { return whole.narrow(0, first, rows.size(0)); };
    ops::linear_with_activation_into(ctx, rows, w, b, kind, {pre ? part(pre_rows) : pre, part(y_rows)});
  });
  return {record_column(tp, x, std::move(pre), weight, bias), std::move(y)};
}

}  // namespace tessera
