#pragma once
/// Single values: from YAML nodes, strictly by the type of the member, and back to YAML text.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/config_names.hpp"
#include "base/suggest.hpp"
#include "base/yaml_tree.hpp"

namespace tessera {

/// Why a value was refused, to be said after the key: "must be an integer, not 'x'"; empty = it was read.
using Refusal = std::string;
using WeightedPaths = std::vector<std::pair<double, std::string>>;

Refusal read_value(const YamlNode& node, std::int64_t& value);
Refusal read_value(const YamlNode& node, double& value);
Refusal read_value(const YamlNode& node, bool& value);
Refusal read_value(const YamlNode& node, std::string& value);
Refusal read_value(const YamlNode& node, std::vector<double>& value);
Refusal read_value(const YamlNode& node, std::vector<std::int64_t>& value);
Refusal read_value(const YamlNode& node, std::vector<std::string>& value);
Refusal read_value(const YamlNode& node, WeightedPaths& value);

/// The message for a word that is none of `names`.
Refusal refuse_name(const YamlNode& node, const std::vector<std::string_view>& names,
                    std::span<const LaterName> later);

template <IsChoice E>
Refusal read_value(const YamlNode& node, E& value) {
  const EnumNames<E> names = names_of(E{});
  std::vector<std::string_view> known;
  for (const EnumName<E>& entry : names.values) {
    known.push_back(entry.name);
    if (node.kind == YamlNode::Kind::scalar && node.text == entry.name) {
      value = entry.value;
      return {};
    }
  }
  return refuse_name(node, known, names.later);
}

template <typename T>
Refusal read_value(const YamlNode& node, std::optional<T>& value) {
  value.reset();
  if (node.kind == YamlNode::Kind::null) return {};
  T inner{};
  Refusal refusal = read_value(node, inner);
  if (refusal.empty()) value = std::move(inner);
  return refusal;
}

std::string yaml_text(std::int64_t value);
/// The shortest spelling that reads back to the same number, with a point, as YAML 1.1 readers want it.
std::string yaml_text(double value);
std::string yaml_text(bool value);
std::string yaml_text(const std::string& value);
std::string yaml_text(const std::vector<double>& value);
std::string yaml_text(const std::vector<std::int64_t>& value);
std::string yaml_text(const std::vector<std::string>& value);
std::string yaml_text(const WeightedPaths& value);

template <IsChoice E>
std::string yaml_text(E value) {
  return std::string(name_of(value));
}

template <typename T>
std::string yaml_text(const std::optional<T>& value) {
  return value ? yaml_text(*value) : "null";
}

}  // namespace tessera
