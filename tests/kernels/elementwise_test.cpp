/// axpby, add, strided copies and fills against plain loops.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "kernels/cpu/vector/elementwise.hpp"
#include "tests/kernels/buffer.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::expect_same;

constexpr std::int64_t kSizes[] = {0, 1, 3, 16, 17, 8209};
constexpr DType kDtypes[] = {DType::f32, DType::bf16, DType::f16};

TEST(Elementwise, Axpby) {
  for (const std::int64_t n : kSizes) {
    for (const DType x_dtype : kDtypes) {
      for (const DType y_dtype : kDtypes) {
        for (const float beta : {0.0f, 1.0f, -0.25f}) {
          SCOPED_TRACE(::testing::Message()
                       << n << " of " << x_dtype << " to " << y_dtype << ", beta " << beta);
          const Buffer x = Buffer::random(x_dtype, n, 1);
          // With beta 0, y must not be read.
          const Buffer before =
              beta == 0.0f ? Buffer(y_dtype, n, std::nan("")) : Buffer::random(y_dtype, n, 2);
          std::vector<double> want;
          for (std::int64_t i = 0; i < n; ++i)
            want.push_back(1.5 * x[i] + (beta == 0.0f ? 0.0 : beta * before[i]));
          Buffer results[2] = {before, before};
          for (const int threads : {1, 2}) {
            cpu::axpby({.n = n,
                        .alpha = 1.5f,
                        .beta = beta,
                        .x_dtype = x_dtype,
                        .y_dtype = y_dtype,
                        .x = x.data(),
                        .y = results[threads - 1].data()},
                       {.threads = threads});
          }
          expect_close(results[0], want, 3e-7);
          expect_same(results[0], results[1]);
        }
      }
    }
  }
}

TEST(Elementwise, EveryCopyOfAxpby) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Buffer x = Buffer::random(dtype, 77, 1), y = Buffer::random(DType::f32, 77, 2);
    std::vector<double> want;
    for (std::int64_t i = 0; i < 77; ++i) want.push_back(2.0 * x[i] + y[i]);
    for (auto [isa, range] : TESSERA_COPIES(axpby_range)) {
      SCOPED_TRACE(cpu::isa_name(isa));
      Buffer out = y;
      range({.n = 77, .alpha = 2.0f, .beta = 1.0f, .x_dtype = dtype, .x = x.data(), .y = out.data()}, 0, 77);
      expect_close(out, want, 3e-7);
    }
  }
}

TEST(Elementwise, Add) {
  for (const std::int64_t n : kSizes) {
    for (int dtypes = 0; dtypes < 16; ++dtypes) {
      // fp32 and one of the 16-bit types, in all combinations.
      const auto dtype = [&](int bit) {
        return (dtypes >> bit & 1) == 0 ? DType::f32 : dtypes < 8 ? DType::bf16 : DType::f16;
      };
      const Buffer a = Buffer::random(dtype(0), n, 1), b = Buffer::random(dtype(1), n, 2);
      std::vector<double> want;
      for (std::int64_t i = 0; i < n; ++i) want.push_back(a[i] + b[i]);
      Buffer out(dtype(2), n);
      cpu::add({.n = n,
                .a_dtype = a.dtype(),
                .b_dtype = b.dtype(),
                .out_dtype = out.dtype(),
                .a = a.data(),
                .b = b.data(),
                .out = out.data()},
               {.threads = 2});
      expect_close(out, want, 3e-7);
      if (b.dtype() == out.dtype()) {
        Buffer in_place = b;
        cpu::add({.n = n,
                  .a_dtype = a.dtype(),
                  .b_dtype = b.dtype(),
                  .out_dtype = b.dtype(),
                  .a = a.data(),
                  .b = in_place.data(),
                  .out = in_place.data()},
                 {});
        expect_same(in_place, out);
      }
    }
  }
}

template <typename Word>
void check_copy(const std::array<std::int64_t, 4>& size, const std::array<int, 4>& order, DType dtype,
                std::int64_t pad) {
  // The source is row-major with padded rows; the destination has its dimensions in the given order.
  std::int64_t src_stride[4], dst_stride[4];
  std::int64_t src_size = 1, dst_size = 1;
  for (int i = 3; i >= 0; --i) {
    src_stride[i] = src_size;
    src_size *= size[static_cast<std::size_t>(i)] + (i == 3 ? pad : 0);
  }
  for (int i = 3; i >= 0; --i) {
    const auto d = static_cast<std::size_t>(order[static_cast<std::size_t>(i)]);
    dst_stride[d] = dst_size;
    dst_size *= size[d];
  }
  std::vector<Word> src(static_cast<std::size_t>(src_size)), dst(static_cast<std::size_t>(dst_size));
  std::iota(src.begin(), src.end(), Word{1});
  for (const int threads : {1, 2}) {
    std::fill(dst.begin(), dst.end(), Word{0});
    CopyStrided params{.dtype = dtype, .src = src.data(), .dst = dst.data()};
    for (int i = 0; i < 4; ++i) {
      params.size[i] = size[static_cast<std::size_t>(i)];
      params.src_stride[i] = src_stride[i];
      params.dst_stride[i] = dst_stride[i];
    }
    cpu::copy_strided(params, {.threads = threads});
    for (std::int64_t i = 0; i < size[0]; ++i) {
      for (std::int64_t j = 0; j < size[1]; ++j) {
        for (std::int64_t k = 0; k < size[2]; ++k) {
          for (std::int64_t l = 0; l < size[3]; ++l) {
            const auto from = i * src_stride[0] + j * src_stride[1] + k * src_stride[2] + l * src_stride[3];
            const auto to = i * dst_stride[0] + j * dst_stride[1] + k * dst_stride[2] + l * dst_stride[3];
            ASSERT_EQ(dst[static_cast<std::size_t>(to)], src[static_cast<std::size_t>(from)])
                << i << " " << j << " " << k << " " << l;
          }
        }
      }
    }
  }
}

TEST(Elementwise, CopyStrided) {
  const std::array<std::int64_t, 4> sizes[] = {
      {1, 1, 1, 1}, {1, 1, 1, 9001}, {2, 3, 5, 7}, {3, 1, 67, 35}, {1, 130, 1, 70}};
  std::array<int, 4> order{0, 1, 2, 3};
  do {
    for (const auto& size : sizes) {
      for (const std::int64_t pad : {0, 3}) {
        SCOPED_TRACE(::testing::Message()
                     << size[0] << "x" << size[1] << "x" << size[2] << "x" << size[3] << " in order "
                     << order[0] << order[1] << order[2] << order[3] << ", pad " << pad);
        check_copy<std::uint32_t>(size, order, DType::f32, pad);
        check_copy<std::uint16_t>(size, order, DType::bf16, pad);
        check_copy<std::uint16_t>(size, order, DType::f16, pad);
        check_copy<std::uint8_t>(size, order, DType::u8, pad);
        check_copy<std::uint64_t>(size, order, DType::i64, pad);
        if (HasFatalFailure()) return;
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Elementwise, CopyStridedBroadcastsAndSkipsEmptyBoxes) {
  const float row[3] = {1, 2, 3};
  float out[8] = {};
  cpu::copy_strided(
      {.size = {1, 1, 2, 3}, .src_stride = {0, 0, 0, 1}, .dst_stride = {0, 0, 4, 1}, .src = row, .dst = out},
      {});
  const float want[8] = {1, 2, 3, 0, 1, 2, 3, 0};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(out[i], want[i]);
  cpu::copy_strided({.size = {1, 0, 2, 3}, .src_stride = {0, 0, 0, 1}, .dst_stride = {0, 0, 4, 1}}, {});
}

TEST(Elementwise, Fills) {
  for (const std::int64_t n : kSizes) {
    for (const int threads : {1, 2}) {
      Buffer x(DType::f32, n, 5.0);
      cpu::fill_constant({.n = n, .value = -2.5f, .x = x.floats()}, {.threads = threads});
      for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], -2.5);
      cpu::fill_zero({.bytes = 4 * n, .x = x.data()}, {.threads = threads});
      for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], 0.0);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
