#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

enum class Activation : std::uint8_t { gelu_tanh, gelu_erf, relu, silu, tanh };

/// The normal distribution's tail is Phi(-z) = e^(-z^2/2) q(t) / 2 with t = 1 / (1 + 0.26 z): this is q,
/// erfcx(z / sqrt 2) as a polynomial, a minimax fit, 6e-9 relative for 0 <= z <= 14, where e^(-z^2/2) has
/// long become 0. V is a float or a register of them.
template <typename V>
TESSERA_INLINE V normal_tail_factor(V t) {
  V q = 0.0678522200f * t - 0.3410365004f;
  q = q * t + 0.5819614119f;
  q = q * t - 0.4016173769f;
  q = q * t + 0.4002297977f;
  q = q * t + 0.0624186717f;
  q = q * t + 0.2189617019f;
  q = q * t + 0.2034312427f;
  q = q * t + 0.2078131670f;
  return q * t - 1.4329977e-5f;
}

/// y = f(x), element by element.
struct ActivationForward {
  std::int64_t n = 0;
  Activation kind = Activation::gelu_tanh;
  DType dtype = DType::f32;
  const void* x = nullptr;
  void* y = nullptr;  ///< may be the same memory as x
};

/// dx = f'(x) dy.
struct ActivationBackward {
  std::int64_t n = 0;
  Activation kind = Activation::gelu_tanh;
  DType dtype = DType::f32;
  const void* x = nullptr;
  const void* dy = nullptr;
  void* dx = nullptr;  ///< may be the same memory as dy or x
};

/// y = f(gate) * up, with gate_up[rows, 2 width] = gate | up (Shazeer, "GLU variants improve transformer");
/// f is silu (SwiGLU) or gelu_tanh (GeGLU).
struct SwigluForward {
  std::int64_t rows = 0, width = 0;
  DType dtype = DType::f32;
  const void* gate_up = nullptr;  ///< [rows, 2 width]
  void* y = nullptr;              ///< [rows, width]
  Activation gate = Activation::silu;
};

struct SwigluBackward {
  std::int64_t rows = 0, width = 0;
  DType dtype = DType::f32;
  const void* gate_up = nullptr;  ///< [rows, 2 width]
  const void* dy = nullptr;       ///< [rows, width]
  void* dgate_up = nullptr;       ///< [rows, 2 width]; may be the same memory as gate_up
  Activation gate = Activation::silu;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(activation_forward, ActivationForward)
TESSERA_DECLARE_KERNEL(activation_backward, ActivationBackward)
TESSERA_DECLARE_KERNEL(swiglu_forward, SwigluForward)
TESSERA_DECLARE_KERNEL(swiglu_backward, SwigluBackward)
