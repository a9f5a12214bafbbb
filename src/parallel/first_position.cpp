#include "tessera/ops/elementwise.hpp"
#include "tessera/parallel/functions.hpp"

namespace tessera {
namespace {

class FirstPosition final : public Function {
 public:
  FirstPosition(const Shape& shape, bool holds) : shape_(shape), holds_(holds) {}
  const char* name() const override { return "first_position"; }
  Tensors backward_input(const ExecCtx& ctx, Tensors grads) override {
    // Zeros where the position is another rank's: what comes before may communicate, on every rank.
    Tensor dx = Tensor::empty(ctx, shape_, grads[0].dtype());
    ops::fill_zero(ctx, dx);
    if (holds_) ops::copy(ctx, grads[0], dx.narrow(0, 0, 1).view(grads[0].shape()));
    return {std::move(dx)};
  }

 private:
  Shape shape_;
  bool holds_;
};

}  // namespace

Var first_position(const ExecCtx& ctx, const TensorParallel& tp, const Var& x_var) {
  const Tensor& x = x_var.value();
  TESSERA_CHECK(x.rank() == 3 && x.size(0) > 0, "the first position of ", x.shape(),
                ": [seq, batch, features] has one");
  // A copy: a view would keep all positions alive.
  Tensor y = ops::contiguous(ctx, x.narrow(0, 0, 1)).view({x.size(1), x.size(2)});
  const bool split = tp.sharded_sequence();
  if (split) tp.comm->broadcast(ctx, y, 0).wait(ctx);
  const bool holds = !split || tp.rank() == 0;
  return record({x_var}, std::move(y), [&] { return std::make_unique<FirstPosition>(x.shape(), holds); });
}

}  // namespace tessera
