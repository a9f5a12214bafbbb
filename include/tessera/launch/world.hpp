#pragma once
/// How the processes of a job find each other, whoever started them.

#include <exception>
#include <memory>
#include <string>

#include "tessera/base/env.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/comm/store.hpp"

namespace tessera {

/// The communicator of all processes of the job; of one rank if nobody launched this process, or it alone.
/// Collective. Under `tessera launch` the launcher serves the store through which they meet (TESSERA_STORE);
/// otherwise rank 0 does, at MASTER_ADDR and MASTER_PORT (torchrun listens there itself: the first free of
/// the eight after it; no port given: one that follows from the job's name). It ends with the communicator.
/// The secret is TESSERA_JOB_SECRET. Without it, one made of the launcher's name for the job is used, which
/// keeps jobs apart but nobody out; see `warning_of_open_world`. Errors: ConfigError when it is not known
/// where to meet, or TESSERA_REQUIRE_SECRET asks for a secret; IoError when the port or address cannot be
/// had; CommunicationTimeout naming the ranks that do not come within timeout_s. `while_waiting`: see
/// WhileWaiting, here and in everything that the communicator waits for.
std::shared_ptr<Communicator> connect_world(const Environment& environment, double timeout_s,
                                            const WhileWaiting& while_waiting = {});

/// What a person should know before `connect_world` meets the others over a network without a secret, as one
/// sentence; empty where there is nothing to say. Errors: ConfigError as there.
std::string warning_of_open_world(const Environment& environment);

/// Tells the other ranks why this one is about to end, so that their messages begin with it: for the catch
/// clause around the work, while `world` lives. An error that came from another rank is not told again.
/// Throws nothing.
void tell_others(Communicator& world, const std::exception& error) noexcept;

}  // namespace tessera
