#pragma once
/// Files of JSON lines, as commands read them.

#include <functional>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera::cli {

/// Calls `take` with every line that is not blank, discarded where it is no JSON. Errors: DataError
/// "PATH:LINE: ..." with what `take` says is wrong with one.
void each_json_line(const std::string& path, std::istream& in,
                    const std::function<std::string(nlohmann::ordered_json)>& take);

}  // namespace tessera::cli
