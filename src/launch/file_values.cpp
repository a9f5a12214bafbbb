#include "launch/file_values.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "base/suggest.hpp"
#include "launch/words.hpp"

namespace tessera::launching {

std::string read_text(const std::filesystem::path& path) {
  std::error_code error;
  TESSERA_ENSURE(ConfigError, !std::filesystem::is_directory(path, error), path.string(),
                 ": is a folder, not a file");
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  TESSERA_ENSURE(ConfigError, static_cast<bool>(file), path.string(), ": cannot be read");
  return text.str();
}

void FileReader::enter(const YamlNode& mapping, std::string prefix) {
  mapping_ = &mapping;
  prefix_ = std::move(prefix);
  known_.clear();
}

const YamlNode* FileReader::find(std::string_view key) {
  known_.push_back(key);
  const YamlNode* node = mapping_->find(key);
  return node == nullptr || node->kind == YamlNode::Kind::null ? nullptr : node;
}

const YamlNode* FileReader::scalar(std::string_view key, const char* wanted) {
  const YamlNode* node = find(key);
  if (node == nullptr || node->kind == YamlNode::Kind::scalar) return node;
  fault(*node, prefix_, key, " must be ", wanted, ", not ", node->describe());
  return nullptr;
}

void FileReader::read(std::string_view key, std::optional<std::int64_t>& value) {
  const YamlNode* node = scalar(key, "an integer");
  std::int64_t number = 0;
  if (node == nullptr) return;
  if (parses(node->text, number)) {
    value = number;
  } else {
    fault(*node, prefix_, key, " must be an integer, not ", node->describe());
  }
}

void FileReader::read(std::string_view key, std::optional<double>& value) {
  const YamlNode* node = scalar(key, "a number");
  double number = 0;
  if (node == nullptr) return;
  if (parses(node->text, number) && std::isfinite(number)) {
    value = number;
  } else {
    fault(*node, prefix_, key, " must be a number, not ", node->describe());
  }
}

void FileReader::read(std::string_view key, std::optional<bool>& value) {
  const YamlNode* node = scalar(key, "true or false");
  if (node == nullptr) return;
  value = truth(node->text);
  if (!value) fault(*node, prefix_, key, " must be true or false, not ", node->describe());
}

void FileReader::read(std::string_view key, std::optional<std::string>& value) {
  const YamlNode* node = scalar(key, "a text");
  if (node != nullptr && !node->text.empty()) value = node->text;
}

void FileReader::refuse_unless_empty(std::string_view key, std::string_view reason) {
  const YamlNode* node = find(key);
  if (node == nullptr) return;
  const bool empty =
      (node->kind == YamlNode::Kind::scalar && (node->text.empty() || truth(node->text) == false)) ||
      (node->kind == YamlNode::Kind::sequence && node->items.empty()) ||
      (node->kind == YamlNode::Kind::mapping && node->entries.empty());
  if (!empty) fault(*node, prefix_, key, " ", reason);
}

const YamlNode* FileReader::section(std::string_view key) {
  const YamlNode* node = find(key);
  if (node == nullptr) return nullptr;
  if (node->kind != YamlNode::Kind::mapping) {
    fault(*node, prefix_, key, " must be a mapping of keys to values, not ", node->describe());
    return nullptr;
  }
  return node->entries.empty() ? nullptr : node;
}

void FileReader::refuse_others() {
  for (const auto& [key, value] : mapping_->entries) {
    if (std::find(known_.begin(), known_.end(), key.text) != known_.end()) continue;
    fault(key, "unknown key ", in_quotes(prefix_ + key.text), suggest(key.text, known_));
  }
}

bool FileReader::is_mapping(const YamlNode& key, const YamlNode& value) {
  if (value.kind == YamlNode::Kind::mapping) return true;
  if (value.kind != YamlNode::Kind::null) {
    fault(key, key.text, " must be a mapping of keys to values, not ", value.describe());
  }
  return false;
}

}  // namespace tessera::launching
