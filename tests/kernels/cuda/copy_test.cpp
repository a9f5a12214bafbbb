/// Strided copies on CUDA against the CPU's, over every path: rows in words of 2 to 16 bytes, transpositions,
/// element by element, broadcasts.

#include "kernels/api/elementwise.hpp"
#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;

struct Layout {
  const char* name;
  std::int64_t size[4], src_stride[4], dst_stride[4];
};

constexpr Layout kLayouts[] = {
    {"contiguous", {2, 3, 5, 8}, {120, 40, 8, 1}, {120, 40, 8, 1}},
    {"one element", {1, 1, 1, 1}, {0, 0, 0, 0}, {0, 0, 0, 0}},
    {"rows of a wider matrix", {1, 1, 37, 24}, {0, 0, 40, 1}, {0, 0, 24, 1}},
    {"odd rows", {1, 1, 37, 21}, {0, 0, 41, 1}, {0, 0, 23, 1}},
    {"rows of six", {1, 5, 37, 6}, {0, 400, 10, 1}, {0, 222, 6, 1}},
    {"outer dimensions exchanged", {1, 7, 9, 16}, {0, 144, 16, 1}, {0, 16, 112, 1}},
    {"three outer dimensions", {3, 4, 5, 8}, {8, 24, 96, 1}, {160, 40, 8, 1}},
    {"transposition", {1, 1, 70, 45}, {0, 0, 45, 1}, {0, 0, 1, 70}},
    {"batch of transpositions", {2, 3, 33, 65}, {6435, 2145, 65, 1}, {6435, 2145, 1, 33}},
    {"transposition between outer and inner", {33, 2, 3, 40}, {240, 120, 40, 1}, {1, 3960, 1320, 33}},
    {"nothing contiguous", {1, 3, 6, 7}, {0, 130, 20, 3}, {0, 150, 22, 2}},
    {"broadcast row", {1, 1, 9, 16}, {0, 0, 0, 1}, {0, 0, 16, 1}},
    {"broadcast element", {1, 1, 9, 16}, {0, 0, 1, 0}, {0, 0, 16, 1}},
    {"from one end of a row to the other", {1, 1, 5, 3}, {0, 0, 1, 5}, {0, 0, 3, 1}},
};

std::int64_t extent(const std::int64_t (&size)[4], const std::int64_t (&stride)[4]) {
  std::int64_t last = 0;
  for (int i = 0; i < 4; ++i) last += (size[i] - 1) * stride[i];
  return last + 1;
}

template <typename Word>
void check(const DeviceStream& stream, const Layout& layout, DType dtype, std::size_t offset) {
  SCOPED_TRACE(::testing::Message() << layout.name << " of " << dtype << ", offset " << offset);
  CopyStrided params{.dtype = dtype};
  for (int i = 0; i < 4; ++i) {
    params.size[i] = layout.size[i];
    params.src_stride[i] = layout.src_stride[i];
    params.dst_stride[i] = layout.dst_stride[i];
  }
  std::vector<Word> src(static_cast<std::size_t>(extent(layout.size, layout.src_stride)));
  for (std::size_t i = 0; i < src.size(); ++i) src[i] = static_cast<Word>(i * 2654435761u);
  // What lies between the elements must stay as it is.
  std::vector<Word> dst(static_cast<std::size_t>(extent(layout.size, layout.dst_stride)), Word{99});
  const DeviceBuffer<Word> device_src(stream, src, offset), device_dst(stream, dst, offset);
  params.src = src.data();
  params.dst = dst.data();
  cpu::copy_strided(params, {});
  params.src = device_src.data();
  params.dst = device_dst.data();
  cuda::copy_strided(params, stream.launch());
  ASSERT_EQ(device_dst.host(), dst);
}

TEST(CudaCopyStrided, EqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::in_every_order([&] {
    for (const Layout& layout : kLayouts) {
      for (const std::size_t offset : {0, 1}) {
        check<std::uint8_t>(stream, layout, DType::u8, offset);
        check<std::uint16_t>(stream, layout, DType::bf16, offset);
        check<std::uint32_t>(stream, layout, DType::f32, offset);
        check<std::uint64_t>(stream, layout, DType::i64, offset);
        if (HasFatalFailure()) return;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::kernels
