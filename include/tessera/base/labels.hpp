#pragma once
#include <cstdint>

namespace tessera {

/// Label of a position that is not to be learned.
inline constexpr std::int32_t kIgnoredLabel = -100;

}  // namespace tessera
