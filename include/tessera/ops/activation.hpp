#pragma once
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

/// swiglu and geglu are gated: of x [..., 2f] = gate | up they make silu(gate) * up, or gelu_tanh(gate) * up,
/// [..., f].
enum class ActivationKind { gelu_tanh, gelu_erf, relu, silu, tanh, swiglu, geglu };
constexpr bool is_gated(ActivationKind kind) {
  return kind == ActivationKind::swiglu || kind == ActivationKind::geglu;
}

/// f(x), any shape, x's dtype.
Tensor activation(const ExecCtx& ctx, const Tensor& x, ActivationKind kind);
/// Of one that is not gated.
void activation_into(const ExecCtx& ctx, const Tensor& x, const Tensor& y, ActivationKind kind);
/// f'(x) dy; written over dy when nobody else holds it and it is as large.
Tensor activation_backward(const ExecCtx& ctx, const Tensor& x, const Tensor& dy, ActivationKind kind);
/// `dx` may be dy. Of one that is not gated.
void activation_backward_into(const ExecCtx& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx,
                              ActivationKind kind);

inline Tensor swiglu(const ExecCtx& ctx, const Tensor& gate_up) {
  return activation(ctx, gate_up, ActivationKind::swiglu);
}
/// Gradient of gate_up.
inline Tensor swiglu_backward(const ExecCtx& ctx, const Tensor& gate_up, const Tensor& dy) {
  return activation_backward(ctx, gate_up, dy, ActivationKind::swiglu);
}

}  // namespace tessera::ops
