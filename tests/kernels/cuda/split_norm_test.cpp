/// The pieces of an RMSNorm that ranks share, on CUDA against the CPU's.

#include "kernels/api/split_norm.hpp"

#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_close;
using test::random_values;

template <typename T>
void check(const DeviceStream& stream, std::int64_t rows, std::int64_t cols, std::size_t offset) {
  SCOPED_TRACE(::testing::Message() << rows << "x" << cols << ", offset " << offset);
  const std::vector<T> a = random_values<T>(rows * cols, 1), b = random_values<T>(rows * cols, 2);
  const std::vector<float> rstd = random_values<float>(rows, 3);
  std::vector<float> sums(static_cast<std::size_t>(rows)), roots = random_values<float>(rows, 4, 0.5f, 2.0f);
  const DeviceBuffer<T> device_a(stream, a, offset), device_b(stream, b, offset);
  const DeviceBuffer<float> device_rstd(stream, rstd), device_sums(stream, sums), device_roots(stream, roots);

  RowProducts products{.rows = rows,
                       .cols = cols,
                       .dtype = dtype_of<T>::value,
                       .a = a.data(),
                       .b = b.data(),
                       .out = sums.data()};
  cpu::row_products(products, {});
  products.a = device_a.data(), products.b = device_b.data(), products.out = device_sums.data();
  cuda::row_products(products, stream.launch());
  expect_close(device_sums.host(), sums, 1e-5);

  InverseRoots inverse{.n = rows, .width = 3.0f, .values = roots.data()};
  cpu::inverse_roots(inverse, {});
  inverse.values = device_roots.data();
  cuda::inverse_roots(inverse, stream.launch());
  expect_close(device_roots.host(), roots, 1e-6);

  std::vector<T> y = b;
  NormProjection projection{.rows = rows,
                            .cols = cols,
                            .dtype = dtype_of<T>::value,
                            .width = 9.0f,
                            .x = a.data(),
                            .rstd = rstd.data(),
                            .sums = sums.data(),
                            .y = y.data()};
  cpu::norm_projection(projection, {});
  projection.x = device_a.data(), projection.rstd = device_rstd.data();
  projection.sums = device_sums.data(), projection.y = device_b.data();
  cuda::norm_projection(projection, stream.launch());
  expect_close(device_b.host(), y, 1e-5);
}

TEST(CudaSplitNorm, EqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    for (const std::int64_t cols : {1, 24, 250, 1024}) {
      for (const std::size_t offset : {0, 1}) {
        check<decltype(t)>(stream, 7, cols, offset);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::kernels
