#include "checkpoint/megatron_buffer.hpp"

namespace tessera::checkpoint_detail {

BufferLayout buffer_layout(std::span<const BufferParameter> parameters,
                           std::optional<std::int64_t> bucket_elements) {
  constexpr std::int64_t kAlignment = 64;
  BufferLayout layout{std::vector<std::int64_t>(parameters.size()), 0};
  std::int64_t& bucket = layout.elements;  // where the one that is being filled begins
  std::int64_t filled = 0;
  const auto close = [&] {
    bucket += filled;
    filled = 0;
  };
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const BufferParameter& each = parameters[i];
    filled = (filled + kAlignment - 1) / kAlignment * kAlignment;
    if (each.alone) close();
    layout.begins[i] = bucket + filled;
    filled += each.elements;
    if (each.alone || (bucket_elements && filled >= *bucket_elements)) close();
  }
  close();
  return layout;
}

}  // namespace tessera::checkpoint_detail
