/// Fills on CUDA against the CPU's: the same bits.

#include "kernels/api/elementwise.hpp"
#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_same_bits;

TEST(CudaFill, Zero) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t n : {1, 5, 1003}) {
    const DeviceBuffer<std::uint8_t> x(stream, std::vector<std::uint8_t>(static_cast<std::size_t>(n + 1), 7),
                                       1);
    cuda::fill_zero({.bytes = n, .x = x.data()}, stream.launch());
    std::vector<std::uint8_t> want(static_cast<std::size_t>(n + 1), 0);
    want.back() = 7;
    EXPECT_EQ(x.host(), want);
  }
}

TEST(CudaFill, Constant) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t n : {1, 6, 5003}) {
    for (const std::size_t offset : {0, 1}) {
      const DeviceBuffer<float> x(stream, std::vector<float>(static_cast<std::size_t>(n + 1), 7.0f), offset);
      cuda::fill_constant({.n = n, .value = 0.1f, .x = x.data()}, stream.launch());
      std::vector<float> want(static_cast<std::size_t>(n + 1), 0.1f);
      want.back() = 7.0f;
      EXPECT_EQ(x.host(), want);
    }
  }
}

TEST(CudaFill, NormalEqualsTheCpuBitForBit) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  struct Piece {
    std::int64_t rows, cols, row0, col0, global_cols;
  };
  for (const Piece& piece : {Piece{1, 1, 0, 0, 1}, Piece{1, 3, 0, 2, 5}, Piece{7, 64, 0, 0, 64},
                             Piece{9, 33, 5, 3, 101}, Piece{3, 500, 1 << 20, 1001, 50257}}) {
    SCOPED_TRACE(::testing::Message() << piece.rows << " x " << piece.cols << " from column " << piece.col0);
    std::vector<float> out(static_cast<std::size_t>(piece.rows * piece.cols));
    const DeviceBuffer<float> device_out(stream, out);
    FillNormal params{.rows = piece.rows,
                      .cols = piece.cols,
                      .row0 = piece.row0,
                      .col0 = piece.col0,
                      .global_cols = piece.global_cols,
                      .mean = 0.25f,
                      .std = 0.02f,
                      .key = {.seed = 1234567890123u, .site = 77, .step = 2},
                      .out = out.data()};
    cpu::fill_normal(params, {});
    params.out = device_out.data();
    cuda::fill_normal(params, stream.launch());
    expect_same_bits(device_out.host(), out);
  }
}

}  // namespace
}  // namespace tessera::kernels
