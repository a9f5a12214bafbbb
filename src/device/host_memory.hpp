#pragma once
#include <cstdint>
#include <filesystem>

namespace tessera {

/// The machine's memory in bytes, or what the control group of this process (a container's, a service's) may
/// have of it. `root`: where the files of the system are.
std::int64_t host_memory_bytes(const std::filesystem::path& root = "/");

/// What of it is neither in use nor promised: the machine's available memory, or what is left of the control
/// group's limit beside the memory of its processes.
std::int64_t free_host_memory_bytes(const std::filesystem::path& root = "/");

}  // namespace tessera
