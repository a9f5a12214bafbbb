#include "tessera/comm/heartbeat.hpp"

#include "comm/heartbeats.hpp"
#include "tessera/device/flight.hpp"

namespace tessera {

void heartbeat(Communicator& group) {
  if (const auto& flight = group.flight()) flight->note_progress();
  if (auto* beats = dynamic_cast<Heartbeats*>(&group)) beats->heartbeat();
}

}  // namespace tessera
