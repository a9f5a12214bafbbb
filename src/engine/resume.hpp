#pragma once
/// Which checkpoint a run goes on from.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera {

struct WholeCheckpoint {
  std::optional<std::filesystem::path> dir;  ///< nothing if none is whole
  std::vector<std::string> problems;         ///< of those before it
};

/// The first of `candidates` whose every byte is as it was saved. All ranks check it together, each its
/// share, and come to the same result. Collective: every rank gives the same candidates.
WholeCheckpoint first_whole(const std::vector<std::filesystem::path>& candidates, Communicator& world);

/// Paths as one text for other ranks, and back.
std::string join_paths(const std::vector<std::filesystem::path>& paths);
std::vector<std::filesystem::path> split_paths(const std::string& text);

}  // namespace tessera
