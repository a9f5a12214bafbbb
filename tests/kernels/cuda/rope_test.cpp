/// Rotary embeddings on CUDA against the CPU's.

#include "kernels/api/rope.hpp"

#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_close;
using test::random_values;

struct Sizes {
  std::int64_t rows, heads, head_dim, rotary_dim, gap;
};

template <typename T>
void check(const DeviceStream& stream, const Sizes& s, std::size_t offset, bool interleaved, bool inverse) {
  SCOPED_TRACE(::testing::Message() << s.rows << " rows, " << s.heads << " heads, " << s.rotary_dim << " of "
                                    << s.head_dim << ", offset " << offset << ", interleaved "
                                    << interleaved);
  constexpr std::int64_t kPositions = 50;
  const std::int64_t half = s.rotary_dim / 2, stride = s.heads * s.head_dim + s.gap;
  std::vector<float> cos, sin;
  for (std::int64_t i = 0; i < kPositions * half; ++i) {
    cos.push_back(std::cos(0.37f * static_cast<float>(i)));
    sin.push_back(std::sin(0.37f * static_cast<float>(i)));
  }
  std::vector<std::int32_t> positions;
  for (std::int64_t row = 0; row < s.rows; ++row)
    positions.push_back(static_cast<std::int32_t>(row * 7 % kPositions));
  std::vector<T> x = random_values<T>(s.rows * stride, 1);
  const DeviceBuffer<T> device_x(stream, x, offset);
  const DeviceBuffer<float> device_cos(stream, cos), device_sin(stream, sin);
  const DeviceBuffer<std::int32_t> device_positions(stream, positions);
  Rope params{.rows = s.rows,
              .heads = s.heads,
              .head_dim = s.head_dim,
              .rotary_dim = s.rotary_dim,
              .dtype = dtype_of<T>::value,
              .x = x.data(),
              .row_stride = stride,
              .positions = positions.data(),
              .cos = cos.data(),
              .sin = sin.data(),
              .interleaved = interleaved,
              .inverse = inverse};
  cpu::rope(params, {});
  params.x = device_x.data();
  params.positions = device_positions.data();
  params.cos = device_cos.data();
  params.sin = device_sin.data();
  cuda::rope(params, stream.launch());
  expect_close(device_x.host(), x, 3e-7);
}

TEST(CudaRope, EqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    for (const Sizes& sizes : {Sizes{1, 1, 2, 2, 0}, Sizes{5, 3, 10, 6, 1}, Sizes{9, 4, 64, 64, 0},
                               Sizes{17, 5, 64, 32, 16}, Sizes{3, 9, 128, 128, 8}, Sizes{3, 2, 80, 80, 3}}) {
      for (const std::size_t offset : {0, 1}) {
        for (const bool interleaved : {false, true}) {
          check<decltype(t)>(stream, sizes, offset, interleaved, offset == 1);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(CudaRope, NothingToDo) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  cuda::rope({.heads = 3, .head_dim = 8, .rotary_dim = 8}, stream.launch());
  stream.synchronize();
}

}  // namespace
}  // namespace tessera::kernels
