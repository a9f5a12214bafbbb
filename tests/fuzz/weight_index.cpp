/// model.safetensors.index.json. No accepted name leads out of the folder.

#include "checkpoint/weight_index.hpp"

#include "fuzz.hpp"
#include "tessera/base/error.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto index = fuzz::accepted<CheckpointError>(
      [&] { return checkpoint_detail::parse_weight_index(fuzz::text_of(data, size), "input"); });
  if (!index) return 0;
  for (const auto& [tensor, file] : index->files) {
    fuzz::require(
        !file.empty() && file[0] != '.' && file.find_first_of(std::string_view("/\\\0", 3)) == file.npos,
        "a name leads out of the folder");
  }
  return 0;
}
