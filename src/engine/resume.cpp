#include "engine/resume.hpp"

#include "tessera/engine/state.hpp"

namespace tessera {

WholeCheckpoint first_whole(const std::vector<std::filesystem::path>& candidates, Communicator& world) {
  WholeCheckpoint found;
  for (const auto& dir : candidates) {
    const std::vector<std::string> problems = verify_together(dir, world);
    if (problems.empty()) {
      found.dir = dir;
      break;
    }
    found.problems.insert(found.problems.end(), problems.begin(), problems.end());
  }
  return found;
}

std::string join_paths(const std::vector<std::filesystem::path>& paths) {
  std::string text;
  for (const auto& path : paths) text += path.string() + '\0';
  return text;
}

std::vector<std::filesystem::path> split_paths(const std::string& text) {
  std::vector<std::filesystem::path> paths;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\0', begin);
    paths.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return paths;
}

}  // namespace tessera
