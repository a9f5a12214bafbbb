/// A Hugging Face config.json. What is accepted is written as such a file and read back the same.

#include "fuzz.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/hf.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(fuzz::text_of(data, size));
  const auto config = fuzz::accepted<ConfigError>([&] { return parse_hf_config(text, "input"); });
  if (!config || !hf_misfit(config->model, config->type).empty()) return 0;
  fuzz::require(parse_hf_config(make_hf_config(*config, "", DType::f32), "what was written") == *config,
                "what was read is not read back the same");
  fuzz::require(parse_model_json(to_model_json(*config), "what was written") == *config,
                "what was read is not read back the same from tessera.json");
  return 0;
}
