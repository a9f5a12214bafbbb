/// Activations against their formulas in double.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/cpu/vector/activation.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::expect_same;

constexpr Activation kAll[] = {Activation::gelu_tanh, Activation::gelu_erf, Activation::relu,
                               Activation::silu, Activation::tanh};

double value(Activation kind, double x) {
  switch (kind) {
    case Activation::gelu_tanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::gelu_erf:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::relu:
      return x > 0 ? x : 0;
    case Activation::silu:
      return x / (1.0 + std::exp(-x));
    case Activation::tanh:
      return std::tanh(x);
  }
  return 0;
}

/// By a central difference of fourth order.
double slope(Activation kind, double x) {
  if (kind == Activation::relu) return x > 0 ? 1 : 0;
  const double h = 1e-3;
  return (8.0 * (value(kind, x + h) - value(kind, x - h)) -
          (value(kind, x + 2 * h) - value(kind, x - 2 * h))) /
         (12.0 * h);
}

/// A sweep of [-20, 20], zero included.
Buffer sweep(DType dtype) {
  Buffer x(dtype, 8001);
  for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, (static_cast<double>(i) - 4000.0) * 0.005);
  return x;
}

TEST(Activation, EveryCopyFollowsTheFormula) {
  for (Activation kind : kAll) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const Buffer x = sweep(dtype);
      const Buffer dy = Buffer::random(dtype, x.size(), 1);
      std::vector<double> want, want_gradient;
      for (std::int64_t i = 0; i < x.size(); ++i) {
        want.push_back(value(kind, x[i]));
        want_gradient.push_back(slope(kind, x[i]) * dy[i]);
      }
      const auto forward = TESSERA_COPIES(activation_forward_range);
      const auto backward = TESSERA_COPIES(activation_backward_range);
      for (std::size_t k = 0; k < forward.size(); ++k) {
        SCOPED_TRACE(::testing::Message()
                     << cpu::isa_name(forward[k].isa) << " kind " << static_cast<int>(kind) << " " << dtype);
        Buffer y(dtype, x.size()), dx(dtype, x.size());
        forward[k].function({.n = x.size(), .kind = kind, .dtype = dtype, .x = x.data(), .y = y.data()}, 0,
                            x.size());
        expect_close(y, want, 1.5e-7);
        backward[k].function(
            {.n = x.size(), .kind = kind, .dtype = dtype, .x = x.data(), .dy = dy.data(), .dx = dx.data()}, 0,
            x.size());
        expect_close(dx, want_gradient, 3e-7);
      }
    }
  }
}

TEST(Activation, NegativeTailKeepsItsRelativePrecision) {
  const float x[] = {-2.0f, -4.0f, -6.0f, -8.0f};
  for (Activation kind : {Activation::gelu_erf, Activation::silu, Activation::tanh}) {
    float y[4];
    cpu::activation_forward({.n = 4, .kind = kind, .x = x, .y = y}, {});
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(y[i] / value(kind, x[i]), 1.0, 4e-6) << x[i];
  }
}

TEST(Activation, ExtremesAndNan) {
  const float huge = std::numeric_limits<float>::max(), nan = std::numeric_limits<float>::quiet_NaN();
  const float x[] = {huge, -huge, 100.0f, -100.0f, 0.0f, nan};
  const float one[] = {1, 1, 1, 1, 1, 1};
  for (Activation kind : kAll) {
    const bool bounded = kind == Activation::tanh;
    for (auto [isa, forward] : TESSERA_COPIES(activation_forward_range)) {
      SCOPED_TRACE(::testing::Message() << cpu::isa_name(isa) << " kind " << static_cast<int>(kind));
      float y[6];
      forward({.n = 6, .kind = kind, .x = x, .y = y}, 0, 6);
      const float want[] = {huge, 0, 100, 0, 0};
      const float signs[] = {1, -1, 1, -1, 0};
      for (int i = 0; i < 5; ++i) EXPECT_EQ(y[i], bounded ? signs[i] : want[i]) << x[i];
      EXPECT_TRUE(std::isnan(y[5]));
    }
    for (auto [isa, backward] : TESSERA_COPIES(activation_backward_range)) {
      SCOPED_TRACE(::testing::Message()
                   << cpu::isa_name(isa) << " gradient, kind " << static_cast<int>(kind));
      float dx[6];
      backward({.n = 6, .kind = kind, .x = x, .dy = one, .dx = dx}, 0, 6);
      const float want[] = {1, 0, 1, 0};
      for (int i = 0; i < 4; ++i) EXPECT_NEAR(dx[i], bounded ? 0 : want[i], 1e-30) << x[i];
      EXPECT_EQ(dx[4], bounded ? 1.0f : kind == Activation::relu ? 0.0f : 0.5f);
    }
  }
}

TEST(Activation, OddSizesThreadsAndPlaces) {
  for (std::int64_t n : {1, 2, 7, 31, 97, 10007}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      SCOPED_TRACE(::testing::Message() << n << " of " << dtype);
      const Buffer x = Buffer::random(dtype, n, 2, 4.0), dy = Buffer::random(dtype, n, 3);
      Buffer y(dtype, n), y2(x), dx(dtype, n), dx2(dy), dx3(x);
      const auto kind = Activation::gelu_tanh;
      cpu::activation_forward({.n = n, .kind = kind, .dtype = dtype, .x = x.data(), .y = y.data()},
                              {.threads = 1});
      cpu::activation_forward({.n = n, .kind = kind, .dtype = dtype, .x = y2.data(), .y = y2.data()},
                              {.threads = 2});
      expect_same(y, y2);
      cpu::activation_backward(
          {.n = n, .kind = kind, .dtype = dtype, .x = x.data(), .dy = dy.data(), .dx = dx.data()}, {});
      cpu::activation_backward(
          {.n = n, .kind = kind, .dtype = dtype, .x = x.data(), .dy = dx2.data(), .dx = dx2.data()},
          {.threads = 2});
      cpu::activation_backward(
          {.n = n, .kind = kind, .dtype = dtype, .x = dx3.data(), .dy = dy.data(), .dx = dx3.data()}, {});
      expect_same(dx, dx2);
      expect_same(dx, dx3);
    }
  }
}

struct SwigluReference {
  std::vector<double> y, dgate_up;
};

SwigluReference swiglu(const Buffer& gate_up, const Buffer& dy, std::int64_t rows, std::int64_t width,
                       Activation kind) {
  SwigluReference want;
  want.dgate_up.resize(static_cast<std::size_t>(gate_up.size()));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < width; ++i) {
      const std::int64_t gate = r * 2 * width + i, up = gate + width;
      const double d = dy[r * width + i];
      want.y.push_back(value(kind, gate_up[gate]) * gate_up[up]);
      want.dgate_up[static_cast<std::size_t>(gate)] = d * gate_up[up] * slope(kind, gate_up[gate]);
      want.dgate_up[static_cast<std::size_t>(up)] = d * value(kind, gate_up[gate]);
    }
  }
  return want;
}

class GatedKernels : public ::testing::TestWithParam<Activation> {};
INSTANTIATE_TEST_SUITE_P(Gates, GatedKernels, ::testing::Values(Activation::silu, Activation::gelu_tanh));

TEST_P(GatedKernels, EveryCopyThreadsAndInPlace) {
  for (auto [rows, width] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 5}, {7, 37}, {129, 131}}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const Buffer gate_up = Buffer::random(dtype, rows * 2 * width, 1, 6.0),
                   dy = Buffer::random(dtype, rows * width, 2);
      const SwigluReference want = swiglu(gate_up, dy, rows, width, GetParam());
      const auto forward = TESSERA_COPIES(swiglu_forward_rows);
      const auto backward = TESSERA_COPIES(swiglu_backward_rows);
      for (std::size_t k = 0; k < forward.size(); ++k) {
        SCOPED_TRACE(::testing::Message()
                     << cpu::isa_name(forward[k].isa) << " " << rows << "x" << width << " " << dtype);
        Buffer y(dtype, rows * width), dgate_up(gate_up);
        forward[k].function({.rows = rows,
                             .width = width,
                             .dtype = dtype,
                             .gate_up = gate_up.data(),
                             .y = y.data(),
                             .gate = GetParam()},
                            0, rows);
        expect_close(y, want.y, 3e-7);
        backward[k].function({.rows = rows,
                              .width = width,
                              .dtype = dtype,
                              .gate_up = dgate_up.data(),
                              .dy = dy.data(),
                              .dgate_up = dgate_up.data(),
                              .gate = GetParam()},
                             0, rows);
        expect_close(dgate_up, want.dgate_up, 1e-6);
      }
      Buffer one(dtype, rows * width), two(dtype, rows * width), done(dtype, gate_up.size()),
          dtwo(dtype, gate_up.size());
      for (auto [y, dx, threads] : {std::tuple{&one, &done, 1}, {&two, &dtwo, 2}}) {
        cpu::swiglu_forward({.rows = rows,
                             .width = width,
                             .dtype = dtype,
                             .gate_up = gate_up.data(),
                             .y = y->data(),
                             .gate = GetParam()},
                            {.threads = threads});
        cpu::swiglu_backward({.rows = rows,
                              .width = width,
                              .dtype = dtype,
                              .gate_up = gate_up.data(),
                              .dy = dy.data(),
                              .dgate_up = dx->data(),
                              .gate = GetParam()},
                             {.threads = threads});
      }
      expect_same(one, two);
      expect_same(done, dtwo);
      expect_close(two, want.y, 3e-7);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
