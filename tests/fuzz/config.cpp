/// A training configuration in YAML. What is accepted is printed and read back the same.

#include "tessera/base/config_file.hpp"

#include "fuzz.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto config =
      fuzz::accepted<ConfigError>([&] { return parse_config(fuzz::text_of(data, size), "input"); });
  if (!config) return 0;
  const std::string printed = to_yaml(*config);
  fuzz::require(to_yaml(parse_config(printed, "what was printed")) == printed,
                "what was read is not read back the same");
  return 0;
}
