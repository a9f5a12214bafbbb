#pragma once
/// The first message of what all ranks do together: every rank tells the others what it is about to do,
/// before any of them waits for another in the middle of it. A script whose ranks have come apart ends here,
/// at once and with both places named.

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera {

/// What a rank tells the others beside the name of its call; 64 bytes together.
using MeetingValues = std::array<std::int64_t, 7>;

/// Collective over `group`, blocks. Element r is what rank r gave. `call` names what is done, for people too:
/// "loss.backward()". `place` is asked for where it stands ("train.py:31") if calls differ. Errors:
/// InvalidArgument on every rank where they do, naming calls, places and ranks; CommunicationError as of
/// Pending::wait.
std::vector<MeetingValues> meet(Communicator& group, std::string_view call, const MeetingValues& values = {},
                                const std::function<std::string()>& place = nullptr);

/// "rank 1", "ranks 0, 2 and 5"; of many only the first.
std::string ranks_text(std::span<const int> ranks);

}  // namespace tessera
