#pragma once
/// What collectives on the CPU are made of: elements of tensors, sums and maxima over ranks in rank order.

#include <cstdint>
#include <span>

#include "tessera/base/dtype.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera {

/// Where an element of a contiguous tensor is.
inline std::byte* at(const Tensor& tensor, std::int64_t element) {
  return static_cast<std::byte*>(tensor.raw()) + static_cast<std::size_t>(element) * size_of(tensor.dtype());
}

/// Whether tensors of this type can be reduced: f32, f64, bf16, f16, i32, i64.
bool is_reducible(DType dtype);

/// Element by element, sources[0] with sources[1] and so on in this order, written to every target. bf16 and
/// f16 are reduced in fp32 and rounded once (to nearest even). A maximum with a NaN is NaN. A target may be
/// one of the sources, else they do not overlap. Errors: InternalError for other types.
void reduce_in_order(DType dtype, ReduceOp op, std::span<const void* const> sources,
                     std::span<void* const> targets, std::int64_t count);

}  // namespace tessera
