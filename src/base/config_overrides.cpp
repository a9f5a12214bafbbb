#include "base/config_overrides.hpp"

#include <vector>

namespace tessera {

namespace {

std::vector<std::string> split_path(const std::string& path) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t dot = std::min(path.find('.', begin), path.size());
    parts.push_back(path.substr(begin, dot - begin));
    begin = dot + 1;
  }
  return parts;
}

YamlNode& child_of(YamlNode& mapping, const std::string& key, const Place& place) {
  if (YamlNode* child = mapping.find(key)) return *child;
  YamlNode name;
  name.kind = YamlNode::Kind::scalar;
  name.text = key;
  name.place = place;
  YamlNode value;
  value.place = place;
  mapping.entries.push_back({std::move(name), std::move(value)});
  return mapping.entries.back().value;
}

}  // namespace

void apply_override(YamlNode& root, const std::string& text, int order, Issues& issues) {
  const Place place{"override " + in_quotes(text, 200), order, 0, 0};
  const std::size_t equals = text.find('=');
  if (equals == std::string::npos) {
    issues.add(place, "must be section.key=value");
    return;
  }
  const std::vector<std::string> path = split_path(text.substr(0, equals));
  bool complete = path.size() >= 2;
  for (const std::string& part : path) complete = complete && !part.empty();
  if (!complete) {
    issues.add(place, "must name section and key: section.key=value");
    return;
  }
  YamlNode* node = &root;
  for (const std::string& part : path) {
    if (node->kind == YamlNode::Kind::null) {
      node->kind = YamlNode::Kind::mapping;
      node->place = place;
    }
    if (node->kind == YamlNode::Kind::invalid) return;
    if (node->kind != YamlNode::Kind::mapping) {
      issues.add(place, "there is no key ", in_quotes(part), " in ", node->describe(), " at ",
                 node->place.text());
      return;
    }
    node = &child_of(*node, part, place);
  }
  YamlNode value = parse_yaml(std::string_view(text).substr(equals + 1), place, issues);
  value.place = place;
  *node = std::move(value);
}

}  // namespace tessera
