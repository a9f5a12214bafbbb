#include "tessera/ops/activation.hpp"

#include "kernels/api/activation.hpp"
#include "ops/dispatch.hpp"
#include "ops/matrix.hpp"

namespace tessera::ops {
namespace {

kernels::Activation kernel_kind(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::gelu_tanh:
      return kernels::Activation::gelu_tanh;
    case ActivationKind::gelu_erf:
      return kernels::Activation::gelu_erf;
    case ActivationKind::relu:
      return kernels::Activation::relu;
    case ActivationKind::silu:
      return kernels::Activation::silu;
    case ActivationKind::tanh:
      return kernels::Activation::tanh;
    case ActivationKind::swiglu:
    case ActivationKind::geglu:
      throw InternalError("a gated activation where one without a gate is computed");
  }
  throw InternalError("unknown activation");
}

/// What the gate of a gated one goes through.
kernels::Activation gate_of(ActivationKind kind) {
  return kind == ActivationKind::geglu ? kernels::Activation::gelu_tanh : kernels::Activation::silu;
}

Tensor gated(const ExecCtx& ctx, const Tensor& gate_up, ActivationKind kind) {
  detail::check_contiguous_floats(gate_up, "gate_up");
  TESSERA_CHECK(gate_up.size(-1) % 2 == 0, "gate and up halves need an even width, not ", gate_up.size(-1));
  Shape shape = gate_up.shape();
  shape[-1] = gate_up.size(-1) / 2;
  Tensor y = Tensor::empty(ctx, shape, gate_up.dtype());
  const std::int64_t width = y.size(-1);
  const kernels::SwigluForward params{
      width == 0 ? 0 : y.numel() / width, width, y.dtype(), gate_up.raw(), y.raw(), gate_of(kind)};
  TESSERA_DISPATCH(ctx, swiglu_forward, params);
  return y;
}

Tensor gated_backward(const ExecCtx& ctx, const Tensor& gate_up, const Tensor& dy, ActivationKind kind) {
  detail::check_contiguous_floats(gate_up, "gate_up");
  detail::check_contiguous_floats(dy, "dy");
  TESSERA_CHECK(dy.numel() * 2 == gate_up.numel(), "gradient ", dy.shape(), " for gate and up ",
                gate_up.shape());
  TESSERA_CHECK_EQ(dy.dtype(), gate_up.dtype(), "dtype of the gradient of a gated activation");
  Tensor grad = Tensor::empty(ctx, gate_up.shape(), gate_up.dtype());
  const std::int64_t width = dy.size(-1);
  const kernels::SwigluBackward params{width == 0 ? 0 : dy.numel() / width,
                                       width,
                                       dy.dtype(),
                                       gate_up.raw(),
                                       dy.raw(),
                                       grad.raw(),
                                       gate_of(kind)};
  TESSERA_DISPATCH(ctx, swiglu_backward, params);
  return grad;
}

}  // namespace

Tensor activation(const ExecCtx& ctx, const Tensor& x, ActivationKind kind) {
  if (is_gated(kind)) return gated(ctx, x, kind);
  Tensor y = Tensor::empty(ctx, x.shape(), x.dtype());
  activation_into(ctx, x, y, kind);
  return y;
}

void activation_into(const ExecCtx& ctx, const Tensor& x, const Tensor& y, ActivationKind kind) {
  detail::check_contiguous_floats(x, "x");
  detail::check_contiguous(y, "y");
  detail::check_same_shape(x, y, "activation");
  TESSERA_CHECK_EQ(y.dtype(), x.dtype(), "dtype of an activation");
  const kernels::ActivationForward params{x.numel(), kernel_kind(kind), x.dtype(), x.raw(), y.raw()};
  TESSERA_DISPATCH(ctx, activation_forward, params);
}

Tensor activation_backward(const ExecCtx& ctx, const Tensor& x, const Tensor& dy, ActivationKind kind) {
  if (is_gated(kind)) return gated_backward(ctx, x, dy, kind);
  Tensor dx = dy.is_unique() ? dy : Tensor::empty(ctx, x.shape(), x.dtype());
  activation_backward_into(ctx, x, dy, dx, kind);
  return dx;
}

void activation_backward_into(const ExecCtx& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx,
                              ActivationKind kind) {
  detail::check_contiguous_floats(x, "x");
  detail::check_contiguous_floats(dy, "dy");
  detail::check_contiguous(dx, "dx");
  detail::check_same_shape(x, dy, "activation gradient");
  detail::check_same_shape(x, dx, "activation gradient");
  TESSERA_CHECK_EQ(dy.dtype(), x.dtype(), "dtype of the gradient of an activation");
  TESSERA_CHECK_EQ(dx.dtype(), x.dtype(), "dtype of the gradient of an activation");
  const kernels::ActivationBackward params{x.numel(), kernel_kind(kind), x.dtype(),
                                           x.raw(),   dy.raw(),          dx.raw()};
  TESSERA_DISPATCH(ctx, activation_backward, params);
}

}  // namespace tessera::ops
