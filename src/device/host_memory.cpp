#include "device/host_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace tessera {
namespace {

/// The smallest limit from `group` up to the top of the hierarchy that is mounted at `mount`.
std::int64_t least_limit(const std::filesystem::path& mount, const std::filesystem::path& group,
                         const char* file) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (std::filesystem::path at = group.relative_path();; at = at.parent_path()) {
    std::ifstream in(mount / at / file);
    std::int64_t bytes = 0;
    if (in >> bytes) least = std::min(least, bytes);  // "max" is no number
    if (at.empty()) return least;
  }
}

}  // namespace

std::int64_t host_memory_bytes(const std::filesystem::path& root) {
  std::int64_t bytes = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const std::filesystem::path mounts = root / "sys/fs/cgroup";
  std::ifstream groups(root / "proc/self/cgroup");
  // Lines "number:controllers:group"; version 2 has one, without controllers.
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      group = line.substr(second + 1);
    if (controllers.empty()) bytes = std::min(bytes, least_limit(mounts, group, "memory.max"));
    if (controllers == "memory")
      bytes = std::min(bytes, least_limit(mounts / "memory", group, "memory.limit_in_bytes"));
  }
  return bytes;
}

}  // namespace tessera
