#pragma once
/// The mesh that an Accelerator and its engines share.

#include <memory>

#include "tessera/comm/mesh.hpp"

namespace tessera::bindings {

/// Data ranks are also in a group that is the script's own: what a script does there, in a loss of its own
/// too, never comes between what an engine does among them.
struct ScriptMesh : ProcessMesh {
  /// Collective over `world`.
  ScriptMesh(const std::shared_ptr<Communicator>& world, const MeshShape& shape)
      : ProcessMesh(world, shape), data(world) {
    Communicator& dp = (*this)[Axis::dp];
    if (dp.size() < world->size()) data = dp.split(0, dp.rank(), "dp");
  }

  std::shared_ptr<Communicator> data;
};

}  // namespace tessera::bindings
