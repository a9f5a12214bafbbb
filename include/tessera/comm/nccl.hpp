#pragma once
#include <memory>
#include <string>

#include "tessera/comm/communicator.hpp"
#include "tessera/comm/mesh.hpp"

namespace tessera {

/// Ranks with a GPU each: operations on CUDA tensors go over NCCL, those on CPU tensors, barriers and the
/// comparison of calls (CommOptions::check) over `host`, whose rank, size, name and options this has.
/// Collective over the ranks of `host`, which nobody else uses from then on; groups made by split are of this
/// kind again.
///
/// Starting never blocks, and Pending::wait only makes ctx.stream wait; the host goes on. What that means for
/// errors, for messages (matched in the order of the sender, not by tag) and for sums (not in rank order) is
/// in docs/floors/comm.md. Ranks of one job must be on different GPUs. Errors: ConfigError in a build without
/// CUDA or without that device, InvalidArgument for a device that is not a GPU, CommunicationError naming the
/// group when NCCL does not come up in time.
std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<Communicator> host, Device device);

/// What is to be said of so many hardware queues (CommOptions::cuda_connections) with groups of the mesh's
/// shape over NCCL: with fewer queues than streams, streams that share one hold each other up. Empty if they
/// are enough.
std::string note_on_connections(int connections, const MeshShape& shape);

}  // namespace tessera
