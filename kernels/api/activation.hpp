#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

enum class Activation : std::uint8_t { gelu_tanh, gelu_erf, relu, silu };

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

/// y = silu(gate) * up, with gate_up[rows, 2 width] = gate | up (Shazeer, "GLU variants improve
/// transformer").
struct SwigluForward {
  std::int64_t rows = 0, width = 0;
  DType dtype = DType::f32;
  const void* gate_up = nullptr;  ///< [rows, 2 width]
  void* y = nullptr;              ///< [rows, width]
};

struct SwigluBackward {
  std::int64_t rows = 0, width = 0;
  DType dtype = DType::f32;
  const void* gate_up = nullptr;  ///< [rows, 2 width]
  const void* dy = nullptr;       ///< [rows, width]
  void* dgate_up = nullptr;       ///< [rows, 2 width]; may be the same memory as gate_up
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(activation_forward, ActivationForward)
TESSERA_DECLARE_KERNEL(activation_backward, ActivationBackward)
TESSERA_DECLARE_KERNEL(swiglu_forward, SwigluForward)
TESSERA_DECLARE_KERNEL(swiglu_backward, SwigluBackward)
