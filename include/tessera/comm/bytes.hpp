#pragma once
/// Bytes of any length between ranks: names, messages, records. In host memory, on every kind of
/// communicator. Collective: every rank of the group calls the same one. They block until the bytes are
/// there, at most the group's timeout_s. Errors: CommunicationError as of Pending::wait.

#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera {

/// Element r is what rank r gave; lengths may differ and be 0.
std::vector<std::string> all_gather_bytes(Communicator& group, std::string_view own,
                                          const Communicator::Where& where = Communicator::Where::current());

/// What rank `root` gave, on every rank; what others give is not looked at. Errors: InvalidArgument for a
/// root that is no rank of the group.
std::string broadcast_bytes(Communicator& group, std::string_view bytes, int root = 0,
                            const Communicator::Where& where = Communicator::Where::current());

}  // namespace tessera
