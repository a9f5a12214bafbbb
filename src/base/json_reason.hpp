#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace tessera {

/// What an exception of the JSON library says, without the library's own "[json.exception.parse_error.101] ".
inline std::string reason_of(const nlohmann::json::exception& error) {
  const std::string text = error.what();
  const auto end = text.find("] ");
  return text.starts_with("[json.") && end != std::string::npos ? text.substr(end + 2) : text;
}

}  // namespace tessera
