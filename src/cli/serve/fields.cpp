#include "cli/serve/fields.hpp"

#include <algorithm>
#include <cmath>

namespace tessera::cli::serving {
namespace {

constexpr std::size_t kShown = 60;

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kShown) text = text.substr(0, kShown) + "...";
  return text;
}

[[noreturn]] void refuse(const std::string& name, const std::string& what, const Json& value) {
  throw BadRequest{400, detail::concat(name, " must be ", what, ", not ", shown(value)), name};
}

}  // namespace

std::string error_body(const BadRequest& bad) {
  const char* type = bad.status >= 500 ? "server_error" : "invalid_request_error";
  if (bad.status == 401) type = "authentication_error";
  if (bad.status == 429) type = "rate_limit_error";
  Json error{{"message", bad.message}, {"type", type}, {"param", nullptr}, {"code", bad.status}};
  if (!bad.param.empty()) error["param"] = bad.param;
  return Json{{"error", error}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json parse_body(const std::string& body) {
  if (body.find_first_not_of(" \t\r\n") == std::string::npos)
    throw BadRequest{400, "the body is empty: it should be a JSON object"};
  Json object;
  try {
    object = Json::parse(body);
  } catch (const Json::parse_error& error) {
    const std::size_t at = std::min(error.byte > 0 ? error.byte - 1 : 0, body.size());
    const auto line = 1 + std::count(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    const std::size_t begin = at == 0 ? std::string::npos : body.rfind('\n', at - 1);
    const std::size_t column = begin == std::string::npos ? at + 1 : at - begin;
    throw BadRequest{400, detail::concat("the body is no JSON: line ", line, ", column ", column)};
  } catch (const Json::exception&) {
    throw BadRequest{400, "the body has a number that is too large"};
  }
  if (!object.is_object())
    throw BadRequest{400, detail::concat("the body must be a JSON object, not ", shown(object))};
  return object;
}

const Json* Fields::any(const std::string& name) {
  asked_.insert(name);
  const auto at = object_.find(name);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

std::optional<double> Fields::number(const std::string& name, double low, double high) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) refuse(name, "a number", *value);
  const double number = value->get<double>();
  if (!(number >= low && number <= high))
    refuse(name, detail::concat("between ", low, " and ", high), *value);
  return number;
}

std::optional<std::int64_t> Fields::whole(const std::string& name, std::int64_t low, std::int64_t high) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<std::uint64_t>() <= std::uint64_t(INT64_MAX));
  if (!fits) refuse(name, "a whole number", *value);
  const auto number = value->get<std::int64_t>();
  if (number < low || number > high) refuse(name, detail::concat("between ", low, " and ", high), *value);
  return number;
}

std::optional<bool> Fields::flag(const std::string& name) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(name, "true or false", *value);
  return value->get<bool>();
}

std::optional<std::string> Fields::text(const std::string& name) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(name, "a string", *value);
  return value->get<std::string>();
}

void Fields::only(const std::string& name, const Json& harmless, const std::string& why) {
  const Json* value = any(name);
  if (value != nullptr && *value != harmless)
    throw BadRequest{400, detail::concat(name, " ", shown(*value), " is not supported: ", why), name};
}

void Fields::finish() const {
  for (const auto& [name, value] : object_.items()) {
    if (asked_.contains(name)) continue;
    std::string known;
    for (const std::string& each : asked_) known += (known.empty() ? "" : ", ") + each;
    throw BadRequest{400, detail::concat("unknown field ", shown(name), "; there are ", known), name};
  }
}

}  // namespace tessera::cli::serving
