#pragma once
/// What data ranks have generated, on every rank.

#include <string>
#include <vector>

#include "tessera/comm/mesh.hpp"
#include "tessera/engine/generate.hpp"

namespace tessera::generation {

/// `speaks`: whether this rank drew the tokens of its data rank's prompts, `own`. Collective over `world`.
/// Errors: InvalidArgument on every rank if any speaker has a `failure`.
std::vector<Generated> share_results(Communicator& world, const MeshShape& shape, bool speaks,
                                     const std::string& failure, const std::vector<Generated>& own);

}  // namespace tessera::generation
