#pragma once
/// The JSON header of a safetensors file: parsed without trust, written canonically.

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.hpp"

namespace tessera::checkpoint_detail {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kDamagedRemedy =
    "The file is damaged or is no safetensors file; download or save it again.";

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in the order of their bytes
  std::map<std::string, std::string> metadata;
  /// Of each tensor the format's name of its element type and its dimensions, where all types were asked for.
  std::map<std::string, std::pair<std::string_view, std::vector<std::int64_t>>> declared;
};

/// What may be in a file: what the engine computes with, or all that is only handed on (then an entry's
/// dtype and, beyond Shape::kMaxRank, its shape say nothing).
enum class ElementTypes { engine, all };

/// The length of the header of a file of `file_bytes` that begins with `word`. Errors: CheckpointError naming
/// `path` if it cannot be.
std::uint64_t header_length(const std::filesystem::path& path, std::span<const std::byte, 8> word,
                            std::uint64_t file_bytes);

/// Parses the header text of a file whose data begin at data_begin and which has file_bytes in all.
/// Errors: CheckpointError naming `path`, tensor and reason.
SafetensorsHeader parse_header(const std::filesystem::path& path, std::string_view text,
                               std::uint64_t data_begin, std::uint64_t file_bytes,
                               ElementTypes types = ElementTypes::engine);

/// A file's layout: length word and header as bytes, and entries with their places in the file.
struct SafetensorsLayout {
  std::string prefix;
  std::vector<SafetensorsEntry> entries;
  std::uint64_t file_bytes = 0;
};
/// Errors: InvalidArgument for a name twice, empty or reserved, or a header that would be too long.
SafetensorsLayout lay_out(std::span<const TensorSpec> tensors,
                          const std::map<std::string, std::string>& metadata);

}  // namespace tessera::checkpoint_detail
