#pragma once
/// The keys of a launch file, read one by one from its tree.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/yaml_tree.hpp"
#include "tessera/launch/settings.hpp"

namespace tessera::launching {

/// A file's text. Errors: ConfigError that names it.
std::string read_text(const std::filesystem::path& path);

/// Reads the keys of one mapping. Null means: not said. Wrong types become issues.
class FileReader {
 public:
  explicit FileReader(Issues& issues) : issues_(issues) {}

  /// From now on keys are those of `mapping`; `prefix` comes before their names in messages.
  void enter(const YamlNode& mapping, std::string prefix);

  void read(std::string_view key, std::optional<std::int64_t>& value);
  void read(std::string_view key, std::optional<double>& value);
  /// true, yes, on or false, no, off, as YAML 1.1 has them, in quotes or not.
  void read(std::string_view key, std::optional<bool>& value);
  void read(std::string_view key, std::optional<std::string>& value);
  /// A key that is known and means nothing here, whatever its value.
  void ignore(std::string_view key) { known_.push_back(key); }
  /// A key that may only be absent, null, false, "no" or empty; otherwise `reason` is the issue.
  void refuse_unless_empty(std::string_view key, std::string_view reason);
  /// The mapping under a key; nullptr if there is none, or an empty one.
  const YamlNode* section(std::string_view key);
  const YamlNode* find(std::string_view key);
  /// An issue for every key that nobody asked for, with the nearest name.
  void refuse_others();

  bool is_mapping(const YamlNode& key, const YamlNode& value);
  template <typename... Parts>
  void fault(const YamlNode& node, const Parts&... parts) {
    issues_.add(node.place, parts...);
  }

 private:
  const YamlNode* scalar(std::string_view key, const char* wanted);

  Issues& issues_;
  const YamlNode* mapping_ = nullptr;
  std::string prefix_;
  std::vector<std::string_view> known_;
};

/// A file of `accelerate config`: what the launcher needs goes into the members of `settings`, the rest into
/// its environment, under Accelerate's names. What Tessera cannot do is refused by name.
void read_accelerate(const YamlNode& root, FileReader& reader, LaunchSettings& settings);

}  // namespace tessera::launching
