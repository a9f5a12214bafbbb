#pragma once
/// "section.key=value" on top of the tree of a file.

#include <string>

#include "base/yaml_tree.hpp"

namespace tessera {

/// Puts the value of one override in place of the file's; number `order` from 1. Adds faults to `issues`.
void apply_override(YamlNode& root, const std::string& text, int order, Issues& issues);

}  // namespace tessera
