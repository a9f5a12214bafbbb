#include "checkpoint/slice_runs.hpp"

#include <algorithm>

namespace tessera::checkpoint_detail {

std::optional<TensorSlice> intersect(const TensorSlice& a, const TensorSlice& b) {
  TensorSlice box = a;
  for (int i = 0; i < a.shape.rank(); ++i) {
    const std::int64_t begin = std::max(a.offset[i], b.offset[i]);
    const std::int64_t end = std::min(a.offset[i] + a.shape[i], b.offset[i] + b.shape[i]);
    if (end <= begin) return std::nullopt;
    box.offset[i] = begin;
    box.shape[i] = end - begin;
  }
  return box;
}

void for_each_run(const TensorSlice& source, const TensorSlice& target, const TensorSlice& box,
                  std::size_t element_bytes,
                  const std::function<void(std::uint64_t, std::uint64_t, std::uint64_t)>& run) {
  const int rank = box.shape.rank();
  if (box.shape.numel() == 0) return;
  // Dimensions from `inner` on form one run: all but the first of them are whole in both boxes.
  int inner = std::max(rank - 1, 0);
  while (inner > 0 && box.shape[inner] == source.shape[inner] && box.shape[inner] == target.shape[inner])
    --inner;
  std::int64_t run_elements = 1;
  for (int i = inner; i < rank; ++i) run_elements *= box.shape[i];

  const Shape source_strides = source.shape.contiguous_strides();
  const Shape target_strides = target.shape.contiguous_strides();
  std::array<std::int64_t, Shape::kMaxRank> index{};
  while (true) {
    std::int64_t from = 0, to = 0;
    for (int i = 0; i < rank; ++i) {
      const std::int64_t at = box.offset[i] + index[i];
      from += (at - source.offset[i]) * source_strides[i];
      to += (at - target.offset[i]) * target_strides[i];
    }
    run(static_cast<std::uint64_t>(from) * element_bytes, static_cast<std::uint64_t>(to) * element_bytes,
        static_cast<std::uint64_t>(run_elements) * element_bytes);
    int i = inner - 1;
    while (i >= 0 && ++index[i] == box.shape[i]) index[i--] = 0;
    if (i < 0) return;
  }
}

void check_slice(const std::string& name, const Shape& shape, const TensorSlice& slice) {
  TESSERA_CHECK(slice.offset.rank() == shape.rank() && slice.shape.rank() == shape.rank(), "tensor '", name,
                "' has shape ", shape, "; a slice ", slice.shape, " at ", slice.offset,
                " does not fit its rank");
  for (int i = 0; i < shape.rank(); ++i) {
    TESSERA_CHECK(slice.offset[i] <= shape[i] && slice.shape[i] <= shape[i] - slice.offset[i], "tensor '",
                  name, "' has shape ", shape, "; a slice ", slice.shape, " at ", slice.offset,
                  " lies outside it");
  }
}

}  // namespace tessera::checkpoint_detail
