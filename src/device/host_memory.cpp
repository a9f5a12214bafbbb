#include "device/host_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

namespace tessera {
namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

/// The number behind `key` in a file of lines "key number ...", 0 where there is none.
std::int64_t number_in(const std::filesystem::path& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name;
    std::int64_t value = 0;
    if (words >> name && name == key && words >> value) return value;
  }
  return 0;
}

/// Names of files and lines in the two versions of control groups.
struct Version {
  const char *limit, *in_use;
};
constexpr Version kFirst{"memory.limit_in_bytes", "total_rss"}, kSecond{"memory.max", "anon"};

/// The least of limit(folder of a group), for this process's groups of memory and those above them.
template <typename Limit>
std::int64_t least_over_groups(const std::filesystem::path& root, Limit limit) {
  std::int64_t least = kNoLimit;
  const auto climb = [&](const std::filesystem::path& mount, const std::filesystem::path& group,
                         const Version& version) {
    for (std::filesystem::path at = group.relative_path();; at = at.parent_path()) {
      std::ifstream in(mount / at / version.limit);
      std::int64_t bytes = 0;
      if (in >> bytes) least = std::min(least, limit(bytes, mount / at, version));  // "max" is no number
      if (at.empty()) return;
    }
  };
  const std::filesystem::path mounts = root / "sys/fs/cgroup";
  std::ifstream groups(root / "proc/self/cgroup");
  // Lines "number:controllers:group"; version 2 has one, without controllers.
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1),
                      group = line.substr(second + 1);
    if (controllers.empty()) climb(mounts, group, kSecond);
    if (controllers == "memory") climb(mounts / "memory", group, kFirst);
  }
  return least;
}

}  // namespace

std::int64_t host_memory_bytes(const std::filesystem::path& root) {
  const std::int64_t machine = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return std::min(machine, least_over_groups(
                               root, [](std::int64_t limit, const auto&, const Version&) { return limit; }));
}

std::int64_t free_host_memory_bytes(const std::filesystem::path& root) {
  const std::int64_t machine = 1024 * number_in(root / "proc/meminfo", "MemAvailable:");
  const std::int64_t left =
      least_over_groups(root, [](std::int64_t limit, const auto& group, const Version& version) {
        return std::max<std::int64_t>(0, limit - number_in(group / "memory.stat", version.in_use));
      });
  return std::min(machine, left);
}

}  // namespace tessera
