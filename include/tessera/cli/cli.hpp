#pragma once
#include <string>
#include <vector>

namespace tessera {

/// Runs the command line `tessera ARGS...` and returns its exit code: 0 done, 1 failure, 2 unusable arguments
/// or configuration, 3 the system refused (disk, memory), 4 unusable data or checkpoint, 130 interrupted.
/// Prints; never throws. `self`: what starts this program again, for commands of several processes; without
/// it the file that this process runs.
int cli_main(const std::vector<std::string>& args, const std::vector<std::string>& self = {});

}  // namespace tessera
