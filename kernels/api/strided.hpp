#pragma once
/// How both devices look at CopyStrided: with as few dimensions as it has, and as words of the element's
/// size.

#include <algorithm>
#include <cstdint>

#include "kernels/api/elementwise.hpp"

namespace tessera::kernels {

struct StridedDim {
  std::int64_t size, src, dst;
};

/// The box with its dimensions in order of falling dst stride, those of size 1 dropped and neighbours that
/// are contiguous in both buffers merged; padded in front with size 1.
struct StridedBox {
  StridedDim dims[4] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 0, 0}};

  explicit StridedBox(const CopyStrided& p) {
    StridedDim order[4];
    int count = 0;
    for (int i = 0; i < 4; ++i) {
      if (p.size[i] != 1) order[count++] = {p.size[i], p.src_stride[i], p.dst_stride[i]};
    }
    std::stable_sort(order, order + count,
                     [](const StridedDim& a, const StridedDim& b) { return a.dst > b.dst; });
    int last = 4;
    for (int i = count - 1; i >= 0; --i) {
      const StridedDim& dim = order[i];
      if (last < 4 && dim.src == dims[last].src * dims[last].size &&
          dim.dst == dims[last].dst * dims[last].size) {
        dims[last].size *= dim.size;
      } else {
        dims[--last] = dim;
      }
    }
    if (count == 0) dims[3] = {1, 1, 1};
  }

  bool whole_rows() const { return dims[3].src == 1 && dims[3].dst == 1; }
  bool contiguous() const { return dims[2].size == 1 && whole_rows(); }
  std::int64_t elements() const { return dims[0].size * dims[1].size * dims[2].size * dims[3].size; }
};

/// Calls `visit` with an unsigned integer as large as an element.
template <typename Visit>
void visit_word(DType dtype, Visit&& visit) {
  switch (size_of(dtype)) {
    case 8:
      return visit(std::uint64_t{});
    case 4:
      return visit(std::uint32_t{});
    case 2:
      return visit(std::uint16_t{});
    default:
      return visit(std::uint8_t{});
  }
}

}  // namespace tessera::kernels
