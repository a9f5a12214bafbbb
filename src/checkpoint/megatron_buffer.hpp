#pragma once
/// Where Megatron's distributed optimizer keeps each parameter: in one long tensor per chunk of the model.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tessera::checkpoint_detail {

/// A parameter of the buffer.
struct BufferParameter {
  std::int64_t elements = 0;
  bool alone = false;  ///< a bucket has it alone: an embedding that another stage shares
};
struct BufferLayout {
  std::vector<std::int64_t> begins;  ///< of each parameter, in the order given
  std::int64_t elements = 0;         ///< of the whole buffer
};
/// `parameters`: in the order in which the model registered them; the buffer has them in the reverse one,
/// each at a multiple of 64 elements of its bucket. A bucket ends with the parameter that makes it
/// `bucket_elements` long (nothing: there is one bucket), and what pads its end for data ranks is not stored.
BufferLayout buffer_layout(std::span<const BufferParameter> parameters,
                           std::optional<std::int64_t> bucket_elements);

}  // namespace tessera::checkpoint_detail
