#pragma once
/// tessera.json: what a folder of weights with Tessera's names says about itself.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/checkpoint/hf.hpp"

namespace tessera::checkpoint_detail {

constexpr const char* kTesseraJson = "tessera.json";
constexpr const char* kHfConfigCopy =
    "hf_config.json";  ///< not config.json: from_pretrained must not take the folder for its own
constexpr std::uint64_t kMaxTesseraJsonBytes = 100'000'000;
constexpr std::uint64_t kMaxConfigBytes = 10'000'000;

struct TesseraFolder {
  Architecture config;
  std::optional<HfSource> source;
};

void write_tessera_json(const std::filesystem::path& dir, const Architecture& config, const HfSource* source);
/// From the text of tessera.json alone, without the source's config.json. Errors: CheckpointError naming
/// `origin`.
TesseraFolder parse_tessera_json(std::string_view text, const std::string& origin);
TesseraFolder read_tessera_json(const std::filesystem::path& dir, SymbolicLinks links);

/// Copies those tokenizer and generation files that `from` has.
void copy_extra_files(const std::filesystem::path& from, const std::filesystem::path& to,
                      SymbolicLinks links);

}  // namespace tessera::checkpoint_detail
