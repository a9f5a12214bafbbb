#include "autograd/linear_weights.hpp"
#include "parallel/overlap.hpp"

namespace tessera {
namespace {

/// What happens to the input before the product; none = nothing.
struct Prologue {
  std::optional<ops::ActivationKind> kind = std::nullopt;

  bool gated() const { return kind && ops::is_gated(*kind); }
  Tensor forward(const ExecCtx& ctx, const Tensor& x) const {
    return kind ? ops::activation(ctx, x, *kind) : x;
  }
};

class RowLinear final : public Function {
 public:
  RowLinear(const TensorParallel& tp, const Var& x, const Prologue& prologue, Parameter& weight,
            Parameter* bias)
      : tp_(tp), x_(x), x_grad_(x.requires_grad()), prologue_(prologue), weights_{weight, bias} {}
  const char* name() const override { return "row_linear"; }

  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    const Tensor weight = weights_.weight.value();
    const std::int64_t cols = weight.size(1);
    const bool gathers = tp_.sharded_sequence();
    if (!x_grad_) {
      dy_ = gathers ? detail::gather_positions(ctx, tp_, grads[0]).take(ctx) : std::move(grads[0]);
      return {Tensor()};
    }
    const Tensor pre = prologue_.kind && !prologue_.gated() ? x_.get(ctx) : Tensor();
    Shape shape = grads[0].shape();
    if (gathers) shape[0] *= tp_.size();
    shape[-1] = cols;
    Tensor dx = Tensor::empty(ctx, shape, grads[0].dtype());
    const auto multiply = [&, dx_rows = detail::as_rows(dx)](const Tensor& dy, std::int64_t first) {
      multiply_gradient(ctx, dy, weight, pre, first, dx_rows.narrow(0, first, dy.size(0)));
    };
    if (gathers) {
      dy_ = detail::gather_and_multiply(ctx, tp_, grads[0], cols, multiply);
    } else {
      dy_ = std::move(grads[0]);
      multiply(detail::as_rows(dy_), 0);
    }
    if (prologue_.gated()) return {ops::activation_backward(ctx, x_.get(ctx), dx, *prologue_.kind)};
    return {std::move(dx)};
  }

  void backward_weight(const ExecCtx& ctx) override {
    weights_.add_gradients(ctx, dy_, [&] { return prologue_.forward(ctx, x_.get(ctx)); });
  }
  std::vector<Parameter*> parameters() const override { return weights_.trained(); }

 private:
  /// dx = dy weight for rows from `first` on; with `pre` through the activation of it.
  void multiply_gradient(const ExecCtx& ctx, const Tensor& dy, const Tensor& weight, const Tensor& pre,
                         std::int64_t first, const Tensor& dx) const {
    if (!pre) return ops::matmul_into(ctx, dy, weight, dx, 0.0f, false, false);
    ops::linear_backward_input_into(ctx, dy, weight, detail::as_rows(pre).narrow(0, first, dy.size(0)),
                                    *prologue_.kind, dx);
  }

  TensorParallel tp_;
  SavedInput x_;
  bool x_grad_;
  Prologue prologue_;
  detail::LinearWeights weights_;
  Tensor dy_;  // of all positions
};

/// `input`: what `prologue` makes of x, or empty.
Var run(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, const Prologue& prologue,
        Parameter& weight, Parameter* bias, Tensor input) {
  if (!input) input = prologue.forward(ctx, x.value());
  const Tensor w = weight.value();
  // One rank adds the bias, so that the sum has it once.
  const Tensor b = bias && tp.rank() == 0 ? bias->value() : Tensor();
  Shape shape = input.shape();
  shape[-1] = w.size(0);
  const DType dtype = input.dtype();
  // The product has the only hold on the input, so that its memory is free while the sum is under way.
  detail::MultiplyBlock multiply = [&, rows = detail::as_rows(std::exchange(input, Tensor()))](
                                       const detail::Block& block, const Tensor& part) {
    ops::linear_into(ctx, rows.narrow(0, block.row, block.rows), w.narrow(0, block.col, block.cols),
                     b ? b.narrow(0, block.col, block.cols) : Tensor(), part);
  };
  detail::ArrivingSum sum =
      detail::multiply_and_sum(ctx, tp, shape, dtype, detail::pieces_of_sum(tp, shape), std::move(multiply));
  Tensor y = sum.take(ctx);
  return record({x}, std::move(y),
                [&] { return std::make_unique<RowLinear>(tp, x, prologue, weight, bias); });
}

}  // namespace

Var row_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
               Parameter* bias) {
  if (!tp.active()) return linear(ctx, x, weight, bias);
  return run(ctx, tp, x, {}, weight, bias, {});
}

Var activated_row_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, ops::ActivationKind kind,
                         Parameter& weight, Parameter* bias, Tensor activated) {
  if (!tp.active()) return activated_linear(ctx, x, kind, weight, bias, activated);
  return run(ctx, tp, x, {kind}, weight, bias, std::move(activated));
}

}  // namespace tessera
