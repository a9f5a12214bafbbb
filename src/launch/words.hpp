#pragma once
/// Words of flags and files as values.

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launching {

inline std::string lower(std::string_view text) {
  std::string word(text);
  for (char& c : word) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return word;
}

/// As Accelerate and YAML 1.1 read truth; nullopt for other words.
inline std::optional<bool> truth(std::string_view text) {
  const std::string word = lower(text);
  for (const char* yes : {"y", "yes", "t", "true", "on", "1"}) {
    if (word == yes) return true;
  }
  for (const char* no : {"n", "no", "f", "false", "off", "0"}) {
    if (word == no) return false;
  }
  return std::nullopt;
}

/// The words between the marks `at`, empty ones too.
inline std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == at) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

/// Whether the whole text is a number of that type; if so, `value` is it.
template <typename T>
bool parses(std::string_view text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

}  // namespace tessera::launching
