#include "base/suggest.hpp"
#include "launch/file_values.hpp"
#include "launch/settings_fields.hpp"
#include "tessera/launch/settings.hpp"

namespace tessera {
namespace {

using launching::FileReader;

void read_native(const YamlNode& root, FileReader& reader, LaunchSettings& settings) {
  for (const auto& [key, value] : root.entries) {
    if (key.text != "launch") {
      reader.fault(key, "unknown section ", in_quotes(key.text),
                   "; a launch file has the one section 'launch'");
    } else if (reader.is_mapping(key, value)) {
      reader.enter(value, "launch.");
      launching::each_setting([&](const auto& field) { reader.read(field.name, settings.*field.member); });
      reader.refuse_others();
    }
  }
}

}  // namespace

LaunchSettings parse_launch_file(std::string_view text, const std::string& name) {
  Issues issues;
  Place source;
  source.source = name;
  const YamlNode root = parse_yaml(text, source, issues);
  issues.throw_if_any();
  LaunchSettings settings;
  if (root.kind != YamlNode::Kind::mapping || root.entries.empty()) {
    issues.add(
        source,
        "is no launch file: it needs the section 'launch', or the keys that `accelerate config` writes");
  } else {
    FileReader reader(issues);
    if (root.find("launch") != nullptr) {
      read_native(root, reader, settings);
    } else {
      launching::read_accelerate(root, reader, settings);
    }
  }
  issues.throw_if_any();
  return settings;
}

LaunchSettings read_launch_file(const std::filesystem::path& path) {
  return parse_launch_file(launching::read_text(path), path.string());
}

}  // namespace tessera
