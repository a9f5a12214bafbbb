#pragma once
/// Host tensors at the border of the checkpoint floor: a named span of bytes, and a box of a larger tensor.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/base/dtype.hpp"
#include "tessera/base/shape.hpp"

namespace tessera {

/// A contiguous row-major tensor in host memory that somebody else owns.
struct TensorView {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  const std::byte* data = nullptr;

  std::size_t bytes() const { return static_cast<std::size_t>(shape.numel()) * size_of(dtype); }
  std::span<const std::byte> span() const { return {data, bytes()}; }
};

/// Name, element type and shape of a tensor whose bytes are elsewhere.
struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;

  std::size_t bytes() const { return static_cast<std::size_t>(shape.numel()) * size_of(dtype); }
};

/// A box of a tensor: first index and extent along every dimension.
struct TensorSlice {
  Shape offset;
  Shape shape;

  /// The box that is the whole tensor.
  static TensorSlice whole(const Shape& shape) {
    TensorSlice slice{shape, shape};
    for (int i = 0; i < shape.rank(); ++i) slice.offset[i] = 0;
    return slice;
  }
  /// Rows [begin, end) of the first dimension.
  static TensorSlice rows(const Shape& shape, std::int64_t begin, std::int64_t end) {
    TESSERA_CHECK(shape.rank() >= 1 && 0 <= begin && begin <= end && end <= shape[0], "rows [", begin, ", ",
                  end, ") of a tensor of shape ", shape);
    TensorSlice slice = whole(shape);
    slice.offset[0] = begin;
    slice.shape[0] = end - begin;
    return slice;
  }
  friend bool operator==(const TensorSlice&, const TensorSlice&) = default;
};

}  // namespace tessera
