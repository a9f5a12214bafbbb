#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace tessera {

/// What an exception of the JSON library says, without the library's own "[json.exception.parse_error.101] ".
inline std::string reason_of(const nlohmann::json::exception& error) {
  const std::string text = error.what();
  const auto end = text.find("] ");
  return text.starts_with("[json.") && end != std::string::npos ? text.substr(end + 2) : text;
}

/// A number without fraction that T has room for; the library's own get() turns any other into some value.
/// Errors: nlohmann::json::type_error.
template <typename T>
T whole_number(const nlohmann::json& value) {
  const bool fits = value.is_number_unsigned()
                        ? std::in_range<T>(value.get<std::uint64_t>())
                        : value.is_number_integer() && std::in_range<T>(value.get<std::int64_t>());
  if (!fits)
    throw nlohmann::json::type_error::create(
        302, "type must be a whole number in range, but is " + value.dump(), &value);
  return value.get<T>();
}

/// That of an object's member, where there is one.
template <typename T>
T whole_number_or(const nlohmann::json& object, const char* member, T otherwise) {
  return object.contains(member) ? whole_number<T>(object.at(member)) : otherwise;
}

}  // namespace tessera
