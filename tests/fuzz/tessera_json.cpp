/// tessera.json of a converted model. What is accepted is written and read back the same.

#include "checkpoint/tessera_folder.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto folder = fuzz::accepted<CheckpointError>(
      [&] { return checkpoint_detail::parse_tessera_json(fuzz::text_of(data, size), "input"); });
  if (!folder) return 0;
  fuzz::require(parse_model_json(to_model_json(folder->config), "what was written") == folder->config,
                "what was read is not read back the same");
  return 0;
}
