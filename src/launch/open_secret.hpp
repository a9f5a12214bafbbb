#pragma once
#include <string_view>

namespace tessera::launching {

/// What processes of several machines prove to know where nobody gave them a secret: it keeps nobody out.
constexpr std::string_view kOpenSecret = "no secret: open to whoever reaches this port";

/// What a launcher without a secret comes with when it was turned away: whoever has one knows why then.
constexpr std::string_view kTurnedAway = "a machine without a secret was turned away";

}  // namespace tessera::launching
