#pragma once
/// Which keys of a config.json are known, and what of them is refused.

#include "checkpoint/json_strict.hpp"
#include "tessera/base/families.hpp"

namespace tessera::checkpoint_detail {

/// Refuses options that change the model's maths in a way Tessera does not have, and settings that may do so
/// and that no row knows. Errors: CheckpointError naming the key.
void refuse_what_is_not_had(const JsonView& root, const ModelSpec& spec);

}  // namespace tessera::checkpoint_detail
