#include "kernels/api/activation.hpp"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/gelu.cuh"

namespace tessera::kernels::cuda {
namespace {

template <typename T>
struct Relu {
  __device__ static float value(float x) { return x <= 0.0f ? 0.0f : x; }
  __device__ static float slope(float x) { return x <= 0.0f ? 0.0f : 1.0f; }
};

template <typename T>
struct Silu {
  __device__ static float value(float x) { return quotient<T>(x, 1.0f + exponential<T>(-x)); }
  __device__ static float slope(float x) {
    // Below -80 the slope is 0 in float; the bound keeps e finite. 1 - s is e s, which does not cancel.
    const float z = x < -80.0f ? -80.0f : x;
    const float e = exponential<T>(-z);
    const float s = quotient<T>(1.0f, 1.0f + e);
    return s * (1.0f + z * (e * s));
  }
};

template <typename T>
struct Tanh {
  __device__ static float value(float x) { return tanhf(x); }
  __device__ static float slope(float x) {
    const float e = exponential<T>(-2.0f * fabsf(x));  // 1 - tanh^2 without cancelling
    const float s = quotient<T>(1.0f, 1.0f + e);
    return 4.0f * ((e * s) * s);
  }
};

template <typename Function, typename T>
struct ForwardOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = PackOf<N>;
  const T* x;
  T* y;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    cuda::load(x + i, v.x);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] = Function::value(v.x[j]);
    cuda::store(y + i, v.x);
  }
};

template <typename Function, typename T>
struct BackwardOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = TwoPacks<N>;
  const T* x;
  const T* dy;
  T* dx;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    cuda::load(x + i, v.x);
    cuda::load(dy + i, v.y);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] = Function::slope(v.x[j]) * v.y[j];
    cuda::store(dx + i, v.x);
  }
};

/// Elements are those of y; packs never cross a row.
template <typename Gate, typename T>
struct SwigluForwardOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = TwoPacks<N>;  // gate, up
  std::int64_t width;
  const T* gate_up;
  T* y;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    const T* gate = gate_up + i + row_col(i, width).row * width;
    cuda::load(gate, v.x);
    cuda::load(gate + width, v.y);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] = Gate::value(v.x[j]) * v.y[j];
    cuda::store(y + i, v.x);
  }
};

template <int N>
struct GateUpDy {
  float gate[N], up[N], dy[N];
  std::int64_t at;  // of gate in gate_up
};

template <typename Gate, typename T>
struct SwigluBackwardOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = GateUpDy<N>;
  std::int64_t width;
  const T* gate_up;
  const T* dy;
  T* dgate_up;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    v.at = i + row_col(i, width).row * width;
    cuda::load(gate_up + v.at, v.gate);
    cuda::load(gate_up + v.at + width, v.up);
    cuda::load(dy + i, v.dy);
  }
  template <int N>
  __device__ void store(std::int64_t, Values<N>& v) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float gate = v.gate[j];
      v.gate[j] = v.dy[j] * v.up[j] * Gate::slope(gate);
      v.up[j] = v.dy[j] * Gate::value(gate);
    }
    cuda::store(dgate_up + v.at, v.gate);
    cuda::store(dgate_up + v.at + width, v.up);
  }
};

template <typename T, typename Op>
void run(const Op& op, std::int64_t n, bool aligned, const Launch& where) {
  aligned ? each_pack<kPack<T>>(op, n, where) : each_pack<1>(op, n, where);
}

template <typename T, typename Visit>
void visit_activation(Activation kind, Visit&& visit) {
  switch (kind) {
    case Activation::gelu_tanh:
      return visit(GeluTanh<T>{});
    case Activation::gelu_erf:
      return visit(GeluErf<T>{});
    case Activation::relu:
      return visit(Relu<T>{});
    case Activation::silu:
      return visit(Silu<T>{});
    case Activation::tanh:
      return visit(Tanh<T>{});
  }
}

template <typename T, typename Visit>
void visit_gate(Activation gate, Visit&& visit) {
  if (gate == Activation::gelu_tanh) return visit(GeluTanh<T>{});
  visit(Silu<T>{});
}

}  // namespace

void activation_forward(const ActivationForward& params, const Launch& launch) {
  visit_float(params.dtype, "activation", [&](auto t) {
    using T = decltype(t);
    visit_activation<T>(params.kind, [&](auto function) {
      const ForwardOp<decltype(function), T> op{static_cast<const T*>(params.x), static_cast<T*>(params.y)};
      run<T>(op, params.n, is_aligned(op.x, 16) && is_aligned(op.y, 16), launch);
    });
  });
}

void activation_backward(const ActivationBackward& params, const Launch& launch) {
  visit_float(params.dtype, "activation", [&](auto t) {
    using T = decltype(t);
    visit_activation<T>(params.kind, [&](auto function) {
      const BackwardOp<decltype(function), T> op{
          static_cast<const T*>(params.x), static_cast<const T*>(params.dy), static_cast<T*>(params.dx)};
      run<T>(op, params.n, is_aligned(op.x, 16) && is_aligned(op.dy, 16) && is_aligned(op.dx, 16), launch);
    });
  });
}

void swiglu_forward(const SwigluForward& params, const Launch& launch) {
  visit_float(params.dtype, "swiglu", [&](auto t) {
    using T = decltype(t);
    visit_gate<T>(params.gate, [&](auto gate) {
      const SwigluForwardOp<decltype(gate), T> op{params.width, static_cast<const T*>(params.gate_up),
                                                  static_cast<T*>(params.y)};
      const bool aligned = params.width % kPack<T> == 0 && is_aligned(op.gate_up, 16) && is_aligned(op.y, 16);
      run<T>(op, params.rows * params.width, aligned, launch);
    });
  });
}

void swiglu_backward(const SwigluBackward& params, const Launch& launch) {
  visit_float(params.dtype, "swiglu", [&](auto t) {
    using T = decltype(t);
    visit_gate<T>(params.gate, [&](auto gate) {
      const SwigluBackwardOp<decltype(gate), T> op{params.width, static_cast<const T*>(params.gate_up),
                                                   static_cast<const T*>(params.dy),
                                                   static_cast<T*>(params.dgate_up)};
      const bool aligned = params.width % kPack<T> == 0 && is_aligned(op.gate_up, 16) &&
                           is_aligned(op.dy, 16) && is_aligned(op.dgate_up, 16);
      run<T>(op, params.rows * params.width, aligned, launch);
    });
  });
}

TESSERA_KERNEL_FILE(each_pack_kernel<1, SwigluForwardOp<Silu<float>, float>>);

}  // namespace tessera::kernels::cuda
