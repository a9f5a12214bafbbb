#include "launch/environment.hpp"

namespace tessera::launching {
namespace {

bool names(const std::string& variable, std::string_view name) {
  return variable.size() > name.size() && variable[name.size()] == '=' && variable.starts_with(name);
}

}  // namespace

std::optional<std::string> value_of(const Variables& variables, std::string_view name) {
  for (const std::string& variable : variables) {
    if (names(variable, name)) return variable.substr(name.size() + 1);
  }
  return std::nullopt;
}

void set_variable(Variables& variables, std::string_view name, std::string_view value) {
  std::erase_if(variables, [&](const std::string& variable) { return names(variable, name); });
  variables.push_back(std::string(name) + "=" + std::string(value));
}

void set_variables(Variables& variables, const Variables& more) {
  for (const std::string& variable : more) {
    const auto equals = variable.find('=');
    set_variable(variables, variable.substr(0, equals), variable.substr(equals + 1));
  }
}

void default_variable(Variables& variables, std::string_view name, std::string_view value) {
  if (!value_of(variables, name)) variables.push_back(std::string(name) + "=" + std::string(value));
}

}  // namespace tessera::launching
