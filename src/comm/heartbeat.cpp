#include "tessera/comm/heartbeat.hpp"

#include "comm/heartbeats.hpp"

namespace tessera {

void heartbeat(Communicator& group) {
  if (auto* beats = dynamic_cast<Heartbeats*>(&group)) beats->heartbeat();
}

}  // namespace tessera
