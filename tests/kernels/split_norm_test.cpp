/// The pieces of an RMSNorm that ranks share, against sums in double, on each instruction set.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cpu/vector/split_norm.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using Values = std::vector<double>;

constexpr std::int64_t kRows = 5;

class SplitNorm : public ::testing::TestWithParam<std::tuple<DType, std::int64_t>> {};

TEST_P(SplitNorm, ProductsOfRowsAndProjectionEqualDouble) {
  const auto [dtype, cols] = GetParam();
  Buffer a = Buffer::random(dtype, kRows * cols, 1), b = Buffer::random(dtype, kRows * cols, 2);
  const Values x = a.values(), y = b.values();
  Buffer rstd = Buffer::random(DType::f32, kRows, 3), sums = Buffer::random(DType::f32, kRows, 4);
  Values dots, squares, projected;
  for (std::int64_t r = 0; r < kRows; ++r) {
    const auto row = static_cast<std::size_t>(r);
    double dot = 0, square = 0;
    for (std::size_t i = row * static_cast<std::size_t>(cols); i < (row + 1) * static_cast<std::size_t>(cols);
         ++i) {
      dot += x[i] * y[i];
      square += x[i] * x[i];
      projected.push_back(y[i] - x[i] * rstd.values()[row] * rstd.values()[row] * sums.values()[row] / 7.0);
    }
    dots.push_back(dot);
    squares.push_back(square);
  }
  for (const auto& [isa, products] : TESSERA_COPIES(row_products_rows)) {
    SCOPED_TRACE(cpu::isa_name(isa));
    Buffer out(DType::f32, kRows, 77.0);
    RowProducts params{
        .rows = kRows, .cols = cols, .dtype = dtype, .a = a.data(), .b = b.data(), .out = out.floats()};
    products(params, 0, kRows);
    expect_close(out, dots, 1e-5);
    params.b = a.data();
    products(params, 0, kRows);
    expect_close(out, squares, 1e-5);
  }
  for (const auto& [isa, project] : TESSERA_COPIES(norm_projection_rows)) {
    SCOPED_TRACE(cpu::isa_name(isa));
    Buffer out = b;
    project({.rows = kRows,
             .cols = cols,
             .dtype = dtype,
             .width = 7.0f,
             .x = a.data(),
             .rstd = rstd.floats(),
             .sums = sums.floats(),
             .y = out.data()},
            0, kRows);
    expect_close(out, projected, dtype == DType::f32 ? 1e-6 : 1e-2);
  }
}

TEST(SplitNorm, InverseRootsAreThoseOfMeans) {
  std::vector<float> values = {0.0f, 3.0f, 300.0f};
  cpu::inverse_roots({.n = 3, .width = 3.0f, .eps = 0.25f, .values = values.data()}, {});
  EXPECT_FLOAT_EQ(values[0], 2.0f);
  EXPECT_FLOAT_EQ(values[1], 1.0f / std::sqrt(1.25f));
  EXPECT_FLOAT_EQ(values[2], 1.0f / std::sqrt(100.25f));
}

INSTANTIATE_TEST_SUITE_P(Sizes, SplitNorm,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16, DType::f16),
                                            ::testing::Values<std::int64_t>(1, 13, 64, 200)));

}  // namespace
}  // namespace tessera::kernels
