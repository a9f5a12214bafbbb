/// A launch file, ours or one of `accelerate config`. What it says to workers is one NAME=value each.

#include "fuzz.hpp"
#include "tessera/base/error.hpp"
#include "tessera/launch/settings.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto settings =
      fuzz::accepted<ConfigError>([&] { return parse_launch_file(fuzz::text_of(data, size), "input"); });
  if (!settings) return 0;
  for (const std::string& variable : settings->environment) {
    const std::size_t name = variable.find('=');
    fuzz::require(name != 0 && name != variable.npos && variable.find('\0') == variable.npos,
                  "what is no variable of an environment");
  }
  return 0;
}
