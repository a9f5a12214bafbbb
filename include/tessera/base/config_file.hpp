#pragma once
/// Reading, checking, completing and printing a training configuration. See docs/configuration.md.

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/config.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

/// Reads a YAML file, applies overrides ("section.key=value", later ones win), checks and resolves it.
/// Errors: ConfigError whose text is one line per fault, all at once: "file:line:column: message" or
/// "override 'section.key=value': message".
Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});

/// The same from text; `name` stands for the file in messages.
Config parse_config(std::string_view text, const std::string& name,
                    const std::vector<std::string>& overrides = {});

/// Checks every range and every rule between keys.
/// Errors: ConfigError, one line per fault: "model.num_heads ...".
void validate(const Settings& settings);
void validate(const ModelSettings& settings);

/// `parallel` with `data` settled: what `world_size` processes leave (null: 1 where it is not given), and
/// every rule that needs it checked. Errors: ConfigError with one line per fault, all at once; product of the
/// degrees and processes that differ are one of them.
ParallelConfig resolve_layout(const Settings& settings, std::optional<std::int64_t> world_size);

/// Processes a run needs when no launcher says how many there are: tensor * pipeline * context * data. Where
/// data is null it takes what is left of `devices`, at least 1.
std::int64_t processes_needed(const Config& config, std::int64_t devices = 1);

/// Layers of each piece from a `parallel.pipeline_layout` such as "3,4,4,1". Errors: ConfigError.
std::vector<std::int64_t> layers_per_piece(const std::string& layout);

/// The whole configuration as YAML; `parse_config` of it gives an equal one.
std::string to_yaml(const Settings& settings);

/// One key and its value in YAML's spelling, such as {"model.num_layers", "12"}.
struct ConfigItem {
  std::string key;
  std::string value;

  friend bool operator==(const ConfigItem&, const ConfigItem&) = default;
};

/// Every key of the configuration, in the order of the documentation.
std::vector<ConfigItem> list_items(const Settings& settings);

/// A value as programs hold it: a word of the YAML is a text, null the empty one.
using ConfigValue = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<double>,
                                 std::vector<std::int64_t>, std::vector<std::string>,
                                 std::vector<std::pair<double, std::string>>>;

/// The same keys with their values.
std::vector<std::pair<std::string, ConfigValue>> list_values(const Settings& settings);

/// Shares of training, validation and test from "98,1,1" (one to three numbers, missing ones are 0), summing
/// to 1. Errors: ConfigError for anything else, for a negative or non-finite share, or no training share.
std::array<double, 3> split_shares(const std::string& split);

/// The tables of keys in docs/configuration.md, as Markdown.
std::string config_markdown();

}  // namespace tessera
