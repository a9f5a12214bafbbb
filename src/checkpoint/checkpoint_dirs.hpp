#pragma once
/// Names inside a folder of checkpoints.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::checkpoint_detail {

constexpr const char* kManifestName = "manifest.json";
constexpr const char* kLatestName = "latest";

/// The step of a folder's name, or nothing if it is not exactly one of ours.
std::optional<std::int64_t> step_of(std::string_view name);

/// Removes folders and files that an interrupted save left; brings back a checkpoint caught while being
/// replaced.
void remove_leftovers(const std::filesystem::path& root);

}  // namespace tessera::checkpoint_detail
