#pragma once
#include <memory>
#include <string>

#include "tessera/comm/communicator.hpp"
#include "tessera/comm/store.hpp"

namespace tessera {

struct GlooOptions {
  CommOptions comm;
  /// Address of this machine that other ranks can reach (an IP or host name); empty = the one it reaches the
  /// store from.
  std::string address = {};
  /// Keeps the keys of restarted jobs apart: one value for one call of make_gloo_communicator on all ranks.
  std::string job = "0";
  /// Called by whoever waits for a collective or a message. What it throws ends the wait, and this rank's
  /// part in the job: the others are told as by Communicator::abort.
  WhileWaiting while_waiting = {};
};

/// The processes of a job over TCP. Collective over all `size` ranks. The store is used during set-up, and to
/// tell each other what went wrong; it may end before the communicators do. The connections between ranks are
/// neither authenticated nor encrypted: their addresses are told through the store only, but the network must
/// be a trusted one. An exchange is done() only once it was waited for; its sends end when they were
/// received. Errors: CommunicationError naming the ranks that did not arrive; IoError if `address` is not of
/// this machine.
std::shared_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Store> store, int rank, int size,
                                                     const GlooOptions& options);

/// The key under which rank `rank` of a job leaves the reason why it ended. What stands there is part of the
/// messages that other ranks end with.
std::string error_key(const std::string& job, int rank);

}  // namespace tessera
