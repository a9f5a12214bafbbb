#pragma once
/// Lists of "NAME=value", as processes get them.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launching {

using Variables = std::vector<std::string>;

/// The value of a variable; nullopt if it is not there.
std::optional<std::string> value_of(const Variables& variables, std::string_view name);

/// Sets a variable, whatever it was.
void set_variable(Variables& variables, std::string_view name, std::string_view value);

/// Sets all of `more`.
void set_variables(Variables& variables, const Variables& more);

/// Sets a variable that is not there yet.
void default_variable(Variables& variables, std::string_view name, std::string_view value);

}  // namespace tessera::launching
