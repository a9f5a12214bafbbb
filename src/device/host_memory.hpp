#pragma once
#include <cstdint>
#include <filesystem>

namespace tessera {

/// The machine's memory in bytes, or what the control group of this process (a container's, a service's) may
/// have of it. `root`: where the files of the system are.
std::int64_t host_memory_bytes(const std::filesystem::path& root = "/");

}  // namespace tessera
