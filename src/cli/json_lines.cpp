#include "cli/json_lines.hpp"

#include <istream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.hpp"

namespace tessera::cli {

void each_json_line(const std::string& path, std::istream& in,
                    const std::function<std::string(nlohmann::ordered_json)>& take) {
  std::string line;
  for (std::int64_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string wrong = take(nlohmann::ordered_json::parse(line, nullptr, false));
    TESSERA_ENSURE(DataError, wrong.empty(), path, ":", number, ": ", wrong);
  }
}

}  // namespace tessera::cli
