#pragma once
/// Runs of other programs as run folders of Tessera, and back.

#include <filesystem>
#include <memory>

#include "tessera/checkpoint/run_source.hpp"

namespace tessera {

/// Makes `out` a run's folder: config.yaml, and a checkpoint from which `tessera train out/config.yaml` goes
/// on under any layout. `out` must not exist or be empty; it appears only complete. No more than one tensor
/// is held. Errors: ConfigError for settings that no run can have; CheckpointError if `out` is in use or the
/// source contradicts itself; IoError.
void write_run(const std::filesystem::path& out, const RunSource& source);

/// What a checkpoint of a run holds. Errors: CheckpointError where that is not enough to go on elsewhere: an
/// optimizer that is not Adam, parameters with fewer updates than others, a gradient that waits for its
/// update; IoError.
std::unique_ptr<RunSource> open_run(const std::filesystem::path& checkpoint);

}  // namespace tessera
