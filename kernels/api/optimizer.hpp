#pragma once
#include <cstdint>

#include "kernels/api/launch.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::kernels {

/// One Adam(W) update of n consecutive elements in one pass (Loshchilov & Hutter, "Decoupled weight decay").
/// g = grad * grad_scale (+ weight_decay * main if not decoupled); m, v as usual;
/// main -= lr * (m / correction1) / (sqrt(v / correction2) + eps), after main *= 1 - lr * weight_decay if
/// decoupled.
struct Adam {
  std::int64_t n = 0;
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8,
         weight_decay = 0;  ///< double: 1 - 0.999f is not 0.001f
  bool decoupled = true;
  double correction1 = 1, correction2 = 1;  ///< 1 - beta^t
  float grad_scale = 1;                     ///< clip factor, loss scale and averaging in one
  const float* grad = nullptr;              ///< [n]
  float* main = nullptr;                    ///< [n] fp32 weights
  float* m = nullptr;                       ///< [n]
  float* v = nullptr;                       ///< [n]
  bfloat16* model = nullptr;                ///< [n] compute copy to refresh, or null
};

/// SGD with momentum: g = grad * grad_scale + weight_decay * main; momentum = mu momentum + g; main -= lr *
/// momentum (or lr * (g + mu momentum) if nesterov).
struct Sgd {
  std::int64_t n = 0;
  float lr = 0, momentum = 0, weight_decay = 0;
  bool nesterov = false;
  float grad_scale = 1;
  const float* grad = nullptr;
  float* main = nullptr;
  float* buffer = nullptr;  ///< [n] momentum, null iff momentum is 0
  bfloat16* model = nullptr;
};

}  // namespace tessera::kernels
TESSERA_DECLARE_KERNEL(adam, Adam)
TESSERA_DECLARE_KERNEL(sgd, Sgd)
