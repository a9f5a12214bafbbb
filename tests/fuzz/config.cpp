/// A training configuration in YAML. What is accepted is printed and read back the same.

#include "tessera/base/config_file.hpp"

#include "fuzz.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Config config;
  const auto read = [&] { config = parse_config(fuzz::text_of(data, size), "input"); };
  if (!fuzz::accepts<ConfigError>(read)) return 0;
  const Config again = parse_config(to_yaml(config), "what was printed");
  fuzz::require(list_items(again) == list_items(config), "what was read is not read back the same");
  return 0;
}
