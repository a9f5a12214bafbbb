#pragma once
/// GELU and its slope, for the passes that apply them. T is the dtype of the result.

#include "kernels/api/activation.hpp"
#include "kernels/cuda/common.cuh"

namespace tessera::kernels::cuda {

/// e^x and a / b. For results of 16 bits the hardware's own approximations: they are good to 1e-5, and the
/// exact ones would take longer than the memory access.
template <typename T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) {
    return __expf(x);
  } else {
    return expf(x);
  }
}
template <typename T>
__device__ __forceinline__ float quotient(float a, float b) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(a, b);
  } else {
    return a / b;
  }
}
/// x within [low, high]; NaN stays NaN, so that an overflow upstream is not covered up.
__device__ __forceinline__ float bounded(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

/// gelu(x) = x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks & Gimpel, "Gaussian error
/// linear units"). Since (1 + tanh u) / 2 = sigmoid(2u), nothing cancels for negative x.
template <typename T>
struct GeluTanh {
  static constexpr float kSlope = 1.59576912160573f;  // 2 sqrt(2/pi)
  static constexpr float kCubic = 0.044715f;

  __device__ static float twice_u(float x) { return kSlope * x * (1.0f + kCubic * x * x); }
  __device__ static float value(float x) { return quotient<T>(x, 1.0f + exponential<T>(-twice_u(x))); }
  __device__ static float slope(float x) {
    // Beyond 10 the slope is 1 or 0 in float; without the bound 0 * inf would come up.
    const float z = bounded(x, -10.0f, 10.0f);
    const float e = exponential<T>(-twice_u(z));
    const float s = quotient<T>(1.0f, 1.0f + e);
    return s + z * ((e * s) * s) * (kSlope * (1.0f + 3.0f * kCubic * z * z));
  }
};

/// gelu(x) = x Phi(x), Phi the normal distribution function.
template <typename T>
struct GeluErf {
  __device__ static float distribution(float x, float gauss) {
    const float t = quotient<T>(1.0f, 1.0f + 0.26f * fabsf(x));
    const float tail = 0.5f * gauss * normal_tail_factor(t);
    return x < 0.0f ? tail : 1.0f - tail;
  }
  __device__ static float value(float x) { return x * distribution(x, exponential<T>(-0.5f * x * x)); }
  __device__ static float slope(float x) {
    const float z = bounded(x, -15.0f, 15.0f);
    const float gauss = exponential<T>(-0.5f * z * z);
    return distribution(z, gauss) + z * gauss * 0.398942280401433f;
  }
};

}  // namespace tessera::kernels::cuda
