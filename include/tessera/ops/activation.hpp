#pragma once
#include "tessera/tensor/tensor.hpp"

namespace tessera::ops {

enum class ActivationKind { gelu_tanh, gelu_erf, relu, silu, tanh };

/// f(x), any shape, x's dtype.
Tensor activation(const ExecCtx& ctx, const Tensor& x, ActivationKind kind);
void activation_into(const ExecCtx& ctx, const Tensor& x, const Tensor& y, ActivationKind kind);
/// f'(x) dy; written over dy when nobody else holds it.
Tensor activation_backward(const ExecCtx& ctx, const Tensor& x, const Tensor& dy, ActivationKind kind);
/// `dx` may be dy.
void activation_backward_into(const ExecCtx& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx,
                              ActivationKind kind);

/// silu(gate) * up of gate_up [..., 2f] = gate | up, giving [..., f].
Tensor swiglu(const ExecCtx& ctx, const Tensor& gate_up);
/// Gradient of gate_up.
Tensor swiglu_backward(const ExecCtx& ctx, const Tensor& gate_up, const Tensor& dy);

}  // namespace tessera::ops
