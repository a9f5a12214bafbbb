#include "kernels/cpu/vector/activation.hpp"

#include "kernels/cpu/vector/vec.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

/// gelu(x) = x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks & Gimpel, "Gaussian error
/// linear units"). Since (1 + tanh u) / 2 = sigmoid(2u), nothing cancels for negative x.
struct GeluTanh {
  static constexpr float kSlope = 1.59576912160573f;  // 2 sqrt(2/pi)
  static constexpr float kCubic = 0.044715f;

  TESSERA_INLINE static F twice_u(F x) { return kSlope * x * (1.0f + kCubic * x * x); }
  TESSERA_INLINE static F value(F x) { return x / (1.0f + exp(-twice_u(x))); }
  TESSERA_INLINE static F slope(F x) {
    // Beyond 10 the slope is 1 or 0 in float; without the bound 0 * inf would come up.
    const F z = max(splat(-10.0f), min(splat(10.0f), x));
    const F e = exp(-twice_u(z));
    const F s = 1.0f / (1.0f + e);
    return s + z * ((e * s) * s) * (kSlope * (1.0f + 3.0f * kCubic * z * z));
  }
};

/// gelu(x) = x Phi(x), Phi the normal distribution function.
struct GeluErf {
  TESSERA_INLINE static F distribution(F x, F gauss) {
    const F t = 1.0f / (1.0f + 0.26f * abs(x));
    const F tail = 0.5f * gauss * normal_tail_factor(t);
    return select(x < 0.0f, tail, 1.0f - tail);
  }
  TESSERA_INLINE static F value(F x) { return x * distribution(x, exp(-0.5f * x * x)); }
  TESSERA_INLINE static F slope(F x) {
    const F z = max(splat(-15.0f), min(splat(15.0f), x));
    const F gauss = exp(-0.5f * z * z);
    return distribution(z, gauss) + z * gauss * 0.398942280401433f;
  }
};

struct Relu {
  TESSERA_INLINE static F value(F x) { return select(x <= 0.0f, F{}, x); }
  TESSERA_INLINE static F slope(F x) { return select(x <= 0.0f, F{}, splat(1.0f)); }
};

struct Silu {
  TESSERA_INLINE static F value(F x) { return x / (1.0f + exp(-x)); }
  TESSERA_INLINE static F slope(F x) {
    // Below -80 the slope is 0 in float; the bound keeps e finite. 1 - s is e s, which does not cancel.
    const F z = max(splat(-80.0f), x);
    const F e = exp(-z);
    const F s = 1.0f / (1.0f + e);
    return s * (1.0f + z * (e * s));
  }
};

struct Tanh {
  TESSERA_INLINE static F value(F x) { return tanh_of(x); }
  TESSERA_INLINE static F slope(F x) {
    const F e = exp(-2.0f * min(splat(50.0f), abs(x)));  // 1 - tanh^2 without cancelling
    const F s = 1.0f / (1.0f + e);
    return 4.0f * ((e * s) * s);
  }
};

template <typename Visit>
VEC_INLINE void visit_activation(Activation kind, Visit visit) {
  switch (kind) {
    case Activation::gelu_tanh:
      return visit(GeluTanh{});
    case Activation::gelu_erf:
      return visit(GeluErf{});
    case Activation::relu:
      return visit(Relu{});
    case Activation::silu:
      return visit(Silu{});
    case Activation::tanh:
      return visit(Tanh{});
  }
}

template <typename Function, typename T>
static void forward_range(const ActivationForward& p, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(p.x);
  T* y = static_cast<T*>(p.y);
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    store(y + i, Function::value(load(x + i, lanes)), lanes);
  });
}

template <typename Function, typename T>
static void backward_range(const ActivationBackward& p, std::int64_t begin, std::int64_t end) {
  const T* x = static_cast<const T*>(p.x);
  const T* dy = static_cast<const T*>(p.dy);
  T* dx = static_cast<T*>(p.dx);
  for_lanes(begin, end, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    store(dx + i, Function::slope(load(x + i, lanes)) * load(dy + i, lanes), lanes);
  });
}

void activation_forward_range(const ActivationForward& params, std::int64_t begin, std::int64_t end) {
  visit_activation(params.kind, [&](auto function) VEC_LAMBDA {
    visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA {
      forward_range<decltype(function), decltype(t)>(params, begin, end);
    });
  });
}

void activation_backward_range(const ActivationBackward& params, std::int64_t begin, std::int64_t end) {
  visit_activation(params.kind, [&](auto function) VEC_LAMBDA {
    visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA {
      backward_range<decltype(function), decltype(t)>(params, begin, end);
    });
  });
}

template <typename Gate, typename T>
static void swiglu_forward_of(const SwigluForward& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const T* gate = static_cast<const T*>(p.gate_up) + r * 2 * p.width;
    const T* up = gate + p.width;
    T* y = static_cast<T*>(p.y) + r * p.width;
    for_lanes(0, p.width, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      store(y + i, Gate::value(load(gate + i, lanes)) * load(up + i, lanes), lanes);
    });
  }
}

template <typename Gate, typename T>
static void swiglu_backward_of(const SwigluBackward& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const T* gate = static_cast<const T*>(p.gate_up) + r * 2 * p.width;
    const T* up = gate + p.width;
    const T* dy = static_cast<const T*>(p.dy) + r * p.width;
    T* dgate = static_cast<T*>(p.dgate_up) + r * 2 * p.width;
    T* dup = dgate + p.width;
    for_lanes(0, p.width, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
      const F g = load(gate + i, lanes);
      const F d = load(dy + i, lanes);
      const F dg = d * load(up + i, lanes) * Gate::slope(g);
      const F du = d * Gate::value(g);
      store(dgate + i, dg, lanes);
      store(dup + i, du, lanes);
    });
  }
}

/// The launchers have seen that it is one of the two.
template <typename Visit>
VEC_INLINE void visit_gate(Activation gate, Visit visit) {
  if (gate == Activation::gelu_tanh) {
    visit(GeluTanh{});
  } else {
    visit(Silu{});
  }
}

void swiglu_forward_rows(const SwigluForward& params, std::int64_t begin, std::int64_t end) {
  visit_gate(params.gate, [&](auto gate) VEC_LAMBDA {
    visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA {
      swiglu_forward_of<decltype(gate), decltype(t)>(params, begin, end);
    });
  });
}

void swiglu_backward_rows(const SwigluBackward& params, std::int64_t begin, std::int64_t end) {
  visit_gate(params.gate, [&](auto gate) VEC_LAMBDA {
    visit_dtype(params.dtype, [&](auto t) VEC_LAMBDA {
      swiglu_backward_of<decltype(gate), decltype(t)>(params, begin, end);
    });
  });
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
