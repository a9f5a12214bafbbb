/// Element-by-element kernels on CUDA against the CPU's.

#include "kernels/api/elementwise.hpp"

#include <limits>

#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_close;
using test::expect_same_bits;
using test::for_each_float;
using test::random_values;

TEST(CudaElementwise, AxpbyEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for_each_float([&](auto tx) {
    for_each_float([&](auto ty) {
      using X = decltype(tx);
      using Y = decltype(ty);
      for (const std::int64_t n : {1, 8, 31, 4099}) {
        for (const std::size_t offset : {0, 3}) {
          for (const float alpha : {0.0f, 0.75f}) {
            for (const float beta : {0.0f, -1.5f}) {
              SCOPED_TRACE(::testing::Message() << n << ", alpha " << alpha << ", beta " << beta);
              std::vector<X> x = random_values<X>(n, 1);
              std::vector<Y> y = random_values<Y>(n, 2);
              // A factor of 0 means that the buffer is not read.
              if (alpha == 0.0f) x[0] = X(std::numeric_limits<float>::quiet_NaN());
              if (beta == 0.0f) y[0] = Y(std::numeric_limits<float>::quiet_NaN());
              const DeviceBuffer<X> device_x(stream, x, offset);
              const DeviceBuffer<Y> device_y(stream, y, offset);
              Axpby params{.n = n,
                           .alpha = alpha,
                           .beta = beta,
                           .x_dtype = dtype_of<X>::value,
                           .y_dtype = dtype_of<Y>::value,
                           .x = x.data(),
                           .y = y.data()};
              cpu::axpby(params, {});
              params.x = device_x.data();
              params.y = device_y.data();
              cuda::axpby(params, stream.launch());
              expect_close(device_y.host(), y, 3e-7);
              if (::testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    });
  });
}

template <typename A, typename B, typename Out>
void check_add(const DeviceStream& stream, std::int64_t n, std::size_t offset) {
  const std::vector<A> a = random_values<A>(n, 1);
  const std::vector<B> b = random_values<B>(n, 2);
  std::vector<Out> out(a.size());
  const DeviceBuffer<A> device_a(stream, a, offset);
  const DeviceBuffer<B> device_b(stream, b, offset);
  const DeviceBuffer<Out> device_out(stream, out, offset);
  Add params{.n = n,
             .a_dtype = dtype_of<A>::value,
             .b_dtype = dtype_of<B>::value,
             .out_dtype = dtype_of<Out>::value,
             .a = a.data(),
             .b = b.data(),
             .out = out.data()};
  cpu::add(params, {});
  params.a = device_a.data();
  params.b = device_b.data();
  params.out = device_out.data();
  cuda::add(params, stream.launch());
  expect_same_bits(device_out.host(), out);
  if constexpr (std::is_same_v<A, Out>) {
    params.out = device_a.data();
    cuda::add(params, stream.launch());
    expect_same_bits(device_a.host(), out);
  }
}

TEST(CudaElementwise, AddEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t n : {1, 9, 4099}) {
    for (const std::size_t offset : {0, 1}) {
      SCOPED_TRACE(::testing::Message() << n << ", offset " << offset);
      for_each_float([&](auto t) { check_add<decltype(t), decltype(t), decltype(t)>(stream, n, offset); });
      for_each_float([&](auto t) { check_add<float, decltype(t), float>(stream, n, offset); });
      for_each_float([&](auto t) { check_add<decltype(t), float, decltype(t)>(stream, n, offset); });
      for_each_float([&](auto t) { check_add<decltype(t), decltype(t), float>(stream, n, offset); });
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaElementwise, DropoutDropsWhatTheCpuDrops) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for_each_float([&](auto t) {
    using T = decltype(t);
    for (const std::int64_t cols : {1, 3, 4, 8, 12, 33, 520}) {
      for (const std::size_t offset : {0, 1}) {
        for (const float probability : {0.0f, 0.3f}) {
          SCOPED_TRACE(::testing::Message()
                       << cols << " columns, offset " << offset << ", p " << probability);
          const std::int64_t rows = 13;
          const std::vector<T> x = random_values<T>(rows * cols, 1);
          std::vector<T> y(x.size());
          const DeviceBuffer<T> device_x(stream, x, offset), device_y(stream, y, offset);
          Dropout params{.rows = rows,
                         .cols = cols,
                         .dtype = dtype_of<T>::value,
                         .x = x.data(),
                         .y = y.data(),
                         .spec = {.key = {.seed = 0xabcdef0123456789u, .site = 4, .step = 9},
                                  .probability = probability,
                                  .batch = 3,
                                  .sample0 = 3000000,
                                  .position0 = 2,
                                  .seq_length = 5000}};
          cpu::dropout(params, {});
          params.x = device_x.data();
          params.y = device_y.data();
          cuda::dropout(params, stream.launch());
          expect_same_bits(device_y.host(), y);
          const DeviceBuffer<std::uint32_t> step(stream, {params.spec.key.step});
          params.spec.key.step = 0;  // it lies on the device
          params.spec.key.step_at = step.data();
          params.y = device_x.data();
          cuda::dropout(params, stream.launch());
          expect_same_bits(device_x.host(), y);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(CudaElementwise, ScaleByEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t n : {1, 6, 5003}) {
    for (const std::size_t offset : {0, 1}) {
      std::vector<float> x = random_values<float>(n, 1);
      const float factor = 0.3f;
      const DeviceBuffer<float> device_x(stream, x, offset), device_factor(stream, {factor});
      cpu::scale_by({.n = n, .factor = &factor, .x = x.data()}, {});
      cuda::scale_by({.n = n, .factor = device_factor.data(), .x = device_x.data()}, stream.launch());
      expect_same_bits(device_x.host(), x);
    }
  }
}

TEST(CudaElementwise, NothingToDo) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  cuda::axpby({}, stream.launch());
  cuda::add({}, stream.launch());
  cuda::dropout({.spec = {.key = {}, .probability = 0.5f}}, stream.launch());
  cuda::dropout({}, stream.launch());
  cuda::scale_by({}, stream.launch());
  cuda::copy_strided({.size = {2, 0, 3, 4}}, stream.launch());
  cuda::fill_zero({}, stream.launch());
  cuda::fill_constant({}, stream.launch());
  cuda::fill_normal({}, stream.launch());
  stream.synchronize();
}

}  // namespace
}  // namespace tessera::kernels
