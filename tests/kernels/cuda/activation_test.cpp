/// Activations on CUDA against the CPU's.

#include "kernels/api/activation.hpp"

#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_close;
using test::random_values;

constexpr Activation kKinds[] = {Activation::gelu_tanh, Activation::gelu_erf, Activation::relu,
                                 Activation::silu, Activation::tanh};

/// Values of both signs, the largest that a type of 16 bits tells apart, and what is not finite.
template <typename T>
std::vector<T> inputs(std::int64_t n) {
  std::vector<T> x = random_values<T>(n, 1, 6.0f);
  const float special[] = {0.0f, -0.0f, 30.0f, -30.0f, 200.0f, -200.0f, 6e4f, -6e4f, NAN, INFINITY};
  for (std::size_t i = 0; i < std::size(special) && 2 * i < x.size(); ++i) x[2 * i] = T(special[i]);
  return x;
}

TEST(CudaActivation, EqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    using T = decltype(t);
    for (const std::int64_t n : {1, 7, 8, 1000, 5003}) {
      for (const std::size_t offset : {0, 1}) {
        for (const Activation kind : kKinds) {
          SCOPED_TRACE(::testing::Message()
                       << n << ", kind " << static_cast<int>(kind) << ", offset " << offset);
          const std::vector<T> x = inputs<T>(n), dy = random_values<T>(n, 2);
          std::vector<T> y(x.size()), dx(x.size());
          cpu::activation_forward(
              {.n = n, .kind = kind, .dtype = dtype_of<T>::value, .x = x.data(), .y = y.data()}, {});
          cpu::activation_backward({.n = n,
                                    .kind = kind,
                                    .dtype = dtype_of<T>::value,
                                    .x = x.data(),
                                    .dy = dy.data(),
                                    .dx = dx.data()},
                                   {});
          const DeviceBuffer<T> device_x(stream, x, offset), device_y(stream, x, offset),
              device_dx(stream, dy, offset);
          cuda::activation_forward(
              {.n = n, .kind = kind, .dtype = dtype_of<T>::value, .x = device_y.data(), .y = device_y.data()},
              stream.launch());
          cuda::activation_backward({.n = n,
                                     .kind = kind,
                                     .dtype = dtype_of<T>::value,
                                     .x = device_x.data(),
                                     .dy = device_dx.data(),
                                     .dx = device_dx.data()},
                                    stream.launch());
          expect_close(device_y.host(), y, 2e-6);
          expect_close(device_dx.host(), dx, 2e-6);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(CudaActivation, SlopeOfNanIsNan) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const Activation kind :
       {Activation::gelu_tanh, Activation::gelu_erf, Activation::silu, Activation::tanh}) {
    const DeviceBuffer<float> x(stream, {NAN}), dy(stream, {1.0f});
    cuda::activation_backward({.n = 1, .kind = kind, .x = x.data(), .dy = dy.data(), .dx = x.data()},
                              stream.launch());
    EXPECT_TRUE(std::isnan(x.host()[0])) << static_cast<int>(kind);
  }
}

class CudaGated : public ::testing::TestWithParam<Activation> {};
INSTANTIATE_TEST_SUITE_P(Gates, CudaGated, ::testing::Values(Activation::silu, Activation::gelu_tanh));

TEST_P(CudaGated, EqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    using T = decltype(t);
    for (const std::int64_t width : {1, 3, 8, 24, 520}) {
      for (const std::size_t offset : {0, 1}) {
        SCOPED_TRACE(::testing::Message() << "width " << width << ", offset " << offset);
        const std::int64_t rows = 11;
        const std::vector<T> gate_up = random_values<T>(rows * 2 * width, 3, 5.0f),
                             dy = random_values<T>(rows * width, 4);
        std::vector<T> y(dy.size()), dgate_up(gate_up.size());
        const DType dtype = dtype_of<T>::value;
        cpu::swiglu_forward({.rows = rows,
                             .width = width,
                             .dtype = dtype,
                             .gate_up = gate_up.data(),
                             .y = y.data(),
                             .gate = GetParam()},
                            {});
        cpu::swiglu_backward({.rows = rows,
                              .width = width,
                              .dtype = dtype,
                              .gate_up = gate_up.data(),
                              .dy = dy.data(),
                              .dgate_up = dgate_up.data(),
                              .gate = GetParam()},
                             {});
        const DeviceBuffer<T> device_gate_up(stream, gate_up, offset), device_dy(stream, dy, offset),
            device_y(stream, std::vector<T>(dy.size()), offset);
        cuda::swiglu_forward({.rows = rows,
                              .width = width,
                              .dtype = dtype,
                              .gate_up = device_gate_up.data(),
                              .y = device_y.data(),
                              .gate = GetParam()},
                             stream.launch());
        cuda::swiglu_backward({.rows = rows,
                               .width = width,
                               .dtype = dtype,
                               .gate_up = device_gate_up.data(),
                               .dy = device_dy.data(),
                               .dgate_up = device_gate_up.data(),
                               .gate = GetParam()},
                              stream.launch());
        expect_close(device_y.host(), y, 2e-6);
        expect_close(device_gate_up.host(), dgate_up, 2e-6);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::kernels
