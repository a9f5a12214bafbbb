#include "base/config_values.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

namespace tessera {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::size_t skip_digits(std::string_view text, std::size_t at) {
  while (at < text.size() && is_digit(text[at])) ++at;
  return at;
}

/// [+-] digits [. digits] [e [+-] digits]; sets whether it has neither point nor exponent.
bool is_number(std::string_view text, bool& whole) {
  std::size_t at = !text.empty() && (text[0] == '+' || text[0] == '-') ? 1 : 0;
  const std::size_t first = at;
  at = skip_digits(text, at);
  std::size_t digits = at - first;
  whole = true;
  if (at < text.size() && text[at] == '.') {
    whole = false;
    const std::size_t point = at + 1;
    at = skip_digits(text, point);
    digits += at - point;
  }
  if (digits == 0) return false;
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    whole = false;
    ++at;
    if (at < text.size() && (text[at] == '+' || text[at] == '-')) ++at;
    const std::size_t exponent = at;
    at = skip_digits(text, at);
    if (at == exponent) return false;
  }
  return at == text.size();
}

/// YAML 1.1 takes 010 for eight; nobody means that.
bool has_leading_zero(std::string_view text) {
  const std::size_t sign = text[0] == '+' || text[0] == '-' ? 1 : 0;
  return text.size() > sign + 1 && text[sign] == '0' && is_digit(text[sign + 1]);
}

std::string_view without_plus(std::string_view text) { return text.substr(text[0] == '+' ? 1 : 0); }

/// "1_000" and "1,000" without the separators; empty if it is not that.
std::string ungrouped(std::string_view text) {
  std::string digits;
  for (const char c : text) {
    if (c == '_' || c == ',') continue;
    if (!is_digit(c)) return {};
    digits += c;
  }
  return digits.size() == text.size() ? std::string() : digits;
}

std::string hint_for_number(const YamlNode& node) {
  bool whole = false;
  if (node.kind != YamlNode::Kind::scalar) return {};
  if (node.quoted && is_number(node.text, whole)) return "; leave the quotes out";
  const std::string digits = ungrouped(node.text);
  return digits.empty() ? std::string() : "; write " + digits;
}

std::string hint_for_integer(const YamlNode& node) {
  bool whole = false;
  if (node.kind != YamlNode::Kind::scalar || node.quoted || !is_number(node.text, whole))
    return hint_for_number(node);
  double value = 0.0;
  const std::string_view text = without_plus(node.text);
  std::from_chars(text.data(), text.data() + text.size(), value);
  if (value != std::floor(value) || std::abs(value) > 1e15) return {};
  return detail::concat("; write ", static_cast<std::int64_t>(value));
}

bool is_non_finite(std::string_view text) {
  if (!text.empty() && (text[0] == '+' || text[0] == '-')) text.remove_prefix(1);
  if (!text.empty() && text[0] == '.') text.remove_prefix(1);
  for (const std::string_view name :
       {"inf", "Inf", "INF", "infinity", "Infinity", "nan", "NaN", "NAN", "Nan"}) {
    if (text == name) return true;
  }
  return false;
}

/// A word that YAML readers, ours or others', take for something else than text, in letters of any case.
bool is_reserved(std::string_view text) {
  const auto same = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; };
  for (const std::string_view word :
       {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan"}) {
    if (std::equal(text.begin(), text.end(), word.begin(), word.end(), same)) return true;
  }
  return false;
}

constexpr std::string_view kOtherBooleans[] = {"y", "yes", "on", "n", "no", "off"};

}  // namespace

Refusal read_value(const YamlNode& node, std::int64_t& value) {
  bool whole = false;
  if (node.kind != YamlNode::Kind::scalar || node.quoted || !is_number(node.text, whole) || !whole) {
    return "must be an integer, not " + node.describe() + hint_for_integer(node);
  }
  if (has_leading_zero(node.text)) return "has a leading zero: " + node.describe();
  const std::string_view text = without_plus(node.text);
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc()) return "does not fit 64 bits: " + node.describe();
  return {};
}

Refusal read_value(const YamlNode& node, double& value) {
  bool whole = false;
  if (node.kind == YamlNode::Kind::scalar && !node.quoted && is_non_finite(node.text)) {
    return "must be a finite number, not '" + node.text + "'";
  }
  if (node.kind != YamlNode::Kind::scalar || node.quoted || !is_number(node.text, whole)) {
    return "must be a number, not " + node.describe() + hint_for_number(node);
  }
  if (has_leading_zero(node.text)) return "has a leading zero: " + node.describe();
  const std::string_view text = without_plus(node.text);
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc()) return "is too large or too small for a 64-bit number: " + node.describe();
  return {};
}

Refusal read_value(const YamlNode& node, bool& value) {
  if (node.kind == YamlNode::Kind::scalar && !node.quoted) {
    if (node.text == "true" || node.text == "false") {
      value = node.text == "true";
      return {};
    }
    std::string lower = node.text;
    for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    for (std::size_t i = 0; i < std::size(kOtherBooleans); ++i) {
      if (lower != kOtherBooleans[i]) continue;
      return "must be true or false, not " + node.describe() + "; write " + (i < 3 ? "true" : "false");
    }
    if (lower == "true" || lower == "false") {
      return "must be true or false, not " + node.describe() + "; write it in small letters";
    }
  }
  const bool quoted_word =
      node.kind == YamlNode::Kind::scalar && (node.text == "true" || node.text == "false");
  return "must be true or false, not " + node.describe() + (quoted_word ? "; leave the quotes out" : "");
}

Refusal read_value(const YamlNode& node, std::string& value) {
  if (node.kind != YamlNode::Kind::scalar) return "must be text, not " + node.describe();
  if (!node.quoted && (node.text == "true" || node.text == "false")) {
    return "must be text, not " + node.describe() + "; put it in quotes if you mean the word";
  }
  value = node.text;
  return {};
}

template <typename T>
static Refusal read_list(const YamlNode& node, const char* of, std::vector<T>& value) {
  if (node.kind != YamlNode::Kind::sequence)
    return detail::concat("must be a list of ", of, ", not ", node.describe());
  value.clear();
  for (const YamlNode& item : node.items) {
    if (Refusal refusal = read_value(item, value.emplace_back()); !refusal.empty())
      return "element " + refusal;
  }
  return {};
}

Refusal read_value(const YamlNode& node, std::vector<double>& value) {
  return read_list(node, "numbers", value);
}
Refusal read_value(const YamlNode& node, std::vector<std::int64_t>& value) {
  return read_list(node, "integers", value);
}
Refusal read_value(const YamlNode& node, std::vector<std::string>& value) {
  return read_list(node, "texts", value);
}

Refusal read_value(const YamlNode& node, WeightedPaths& value) {
  value.clear();
  if (node.kind == YamlNode::Kind::null) return {};
  if (node.kind == YamlNode::Kind::scalar) return read_value(node, value.emplace_back(1.0, "").second);
  const char* form = "must be a prefix, a list [[weight, prefix], ...] or a list of prefixes";
  if (node.kind != YamlNode::Kind::sequence || node.items.empty())
    return detail::concat(form, ", not ",
                          node.kind == YamlNode::Kind::sequence ? "an empty list" : node.describe());
  const bool weighted = node.items.front().kind == YamlNode::Kind::sequence;
  for (const YamlNode& item : node.items) {
    auto& [weight, prefix] = value.emplace_back();
    if (!weighted && item.kind == YamlNode::Kind::scalar) {
      weight = node.items.size() > 1 ? kWeightBySize : 1.0;
      if (Refusal refusal = read_value(item, prefix); !refusal.empty()) return "prefix " + refusal;
      continue;
    }
    if (!weighted || item.kind != YamlNode::Kind::sequence || item.items.size() != 2) {
      return detail::concat(form, "; an element is ", item.describe());
    }
    if (Refusal refusal = read_value(item.items[0], weight); !refusal.empty()) return "weight " + refusal;
    if (weight <= 0) return detail::concat("weight must be above 0, not ", yaml_text(weight));
    if (Refusal refusal = read_value(item.items[1], prefix); !refusal.empty()) return "prefix " + refusal;
  }
  return {};
}

Refusal refuse_name(const YamlNode& node, const std::vector<std::string_view>& names,
                    std::span<const LaterName> later) {
  std::vector<std::string_view> all = names;
  for (const LaterName& name : later) {
    if (node.kind == YamlNode::Kind::scalar && node.text == name.name) {
      return "'" + node.text + "' is not in this build yet; " + std::string(name.instead);
    }
    all.push_back(name.name);
  }
  std::string text = "must be ";
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += i == 0 ? "" : i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  text += ", not " + node.describe();
  if (node.kind != YamlNode::Kind::scalar || node.text.empty()) return text;
  const Suggestion nearest = nearest_name(node.text, all);
  return text + (nearest.close ? "; did you mean '" : "; the nearest is '") + std::string(nearest.name) +
         (nearest.close ? "'?" : "'");
}

std::string yaml_text(std::int64_t value) { return std::to_string(value); }

std::string yaml_text(double value) {
  char buffer[40];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
  std::string text(buffer, result.ptr);
  if (text.find('.') == std::string::npos) {
    const auto exponent = text.find('e');
    text.insert(exponent == std::string::npos ? text.size() : exponent, ".0");
  }
  return text;
}

std::string yaml_text(bool value) { return value ? "true" : "false"; }

std::string yaml_text(const std::string& value) {
  bool plain = !value.empty() && (std::isalpha(static_cast<unsigned char>(value[0])) || value[0] == '/');
  std::string quoted = "\"";
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    plain = plain && (std::isalnum(byte) || std::string_view("/._-").find(c) != std::string_view::npos);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      constexpr char kHex[] = "0123456789abcdef";
      quoted += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      quoted += c;
    }
  }
  return plain && !is_reserved(value) ? value : quoted + '"';
}

template <typename T>
static std::string flow_list(const std::vector<T>& values) {
  std::string text = "[";
  for (const T& value : values) text += (text.size() > 1 ? ", " : "") + yaml_text(value);
  return text + "]";
}

std::string yaml_text(const std::vector<double>& value) { return flow_list(value); }
std::string yaml_text(const std::vector<std::int64_t>& value) { return flow_list(value); }
std::string yaml_text(const std::vector<std::string>& value) { return flow_list(value); }

std::string yaml_text(const WeightedPaths& value) {
  if (value.empty()) return "null";
  if (value.size() == 1 && value[0].first == 1.0) return yaml_text(value[0].second);
  std::string text = "[";
  for (const auto& [weight, prefix] : value) {
    text += text.size() > 1 ? ", " : "";
    text += weight == kWeightBySize ? yaml_text(prefix)
                                    : detail::concat("[", yaml_text(weight), ", ", yaml_text(prefix), "]");
  }
  return text + "]";
}

}  // namespace tessera
