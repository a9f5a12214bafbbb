#pragma once
/// Reading what clients send.

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "tessera/base/error.hpp"

namespace tessera::cli::serving {

using Json = nlohmann::ordered_json;

/// What is wrong with a request, for its client.
struct BadRequest {
  int status = 400;
  std::string message;
  std::string param = {};  ///< the field, or empty
};

/// {"error": {"message", "type", "param", "code"}}, as OpenAI's clients read it.
std::string error_body(const BadRequest& bad);

/// The object of a body. Errors: BadRequest, with line and column of what is no JSON.
Json parse_body(const std::string& body);

/// The fields of an object, each asked for once. null is as good as a field that is not there. Errors:
/// BadRequest that names field, what it should be and what it is.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  const Json* any(const std::string& name);
  std::optional<double> number(const std::string& name, double low, double high);
  std::optional<std::int64_t> whole(const std::string& name, std::int64_t low, std::int64_t high);
  std::optional<bool> flag(const std::string& name);
  std::optional<std::string> text(const std::string& name);
  /// One that has no effect here unless it is `harmless`.
  void only(const std::string& name, const Json& harmless, const std::string& why);
  /// Nothing else may be there.
  void finish() const;

 private:
  const Json& object_;
  std::set<std::string> asked_;
};

}  // namespace tessera::cli::serving
