#include "tessera/comm/nccl.hpp"

namespace tessera {

std::string note_on_connections(int connections, const MeshShape& shape) {
  constexpr int kDefault = 8;    // CUDA's own
  constexpr int kOtherwise = 3;  // the rank's own work, memory, the clock
  if (shape.world() == 1) return "";
  int streams = kOtherwise + 1;  // all ranks
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp}) {
    if (shape.along(axis) > 1) ++streams;
  }
  if (shape.cp > 1) ++streams;                              // replicas
  if (shape.ep > 1 && shape.edp() > 1) ++streams;           // those of experts
  if (shape.pp > 1) streams += 1 + (shape.pp > 2 ? 4 : 2);  // tied weights; messages, two ways
  const int queues = connections == 0 ? kDefault : connections;
  if (queues >= streams) return "";
  return detail::concat(
      "this process has ", queues, " hardware queues of its GPU for ", streams,
      " streams (CUDA_DEVICE_MAX_CONNECTIONS", connections == 0 ? " is not set" : "",
      "): streams that share one hold each other up, "
      "and stages of a pipeline may stop each other. Set it to 32 before the process starts, as "
      "tessera launch does");
}

}  // namespace tessera
