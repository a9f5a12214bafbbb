#pragma once
/// Walks the intersection of two boxes of one tensor as contiguous runs of bytes.

#include <cstdint>
#include <functional>
#include <optional>

#include "tessera/checkpoint/tensor_view.hpp"

namespace tessera::checkpoint_detail {

/// The box both have, or nothing if they do not touch.
std::optional<TensorSlice> intersect(const TensorSlice& a, const TensorSlice& b);

/// Calls run(source_byte, target_byte, bytes) for every contiguous run of `box`, in rising order; `source`
/// and `target` are boxes of the same tensor, each stored contiguously, that contain `box`.
void for_each_run(const TensorSlice& source, const TensorSlice& target, const TensorSlice& box,
                  std::size_t element_bytes,
                  const std::function<void(std::uint64_t, std::uint64_t, std::uint64_t)>& run);

/// Throws InvalidArgument unless `slice` lies inside a tensor of this shape.
void check_slice(const std::string& name, const Shape& shape, const TensorSlice& slice);

}  // namespace tessera::checkpoint_detail
