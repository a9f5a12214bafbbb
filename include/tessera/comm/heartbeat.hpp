#pragma once
/// Long work on one rank, while others wait for it.

#include "tessera/comm/communicator.hpp"

namespace tessera {

/// This rank gets on with work that others may be waiting for (reading, verifying, saving, building an
/// index): what waits on any rank of the job, in any group, on the host or on a stream, counts its deadline
/// from now. Called by the work itself after each of its parts, as often as it likes: so a part that hangs
/// renews nothing, nor does a process that was stopped or has died. Never waits, costs next to nothing. This
/// rank's watchdog counts from now as well.
void heartbeat(Communicator& group);

}  // namespace tessera
