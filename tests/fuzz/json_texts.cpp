/// A line of JSON, as preprocessing reads it.

#include <array>

#include "data/documents.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::array<std::string, 2> keys{"text", "title"};
  std::vector<std::string> texts;
  const auto read = [&] { texts = json_texts(std::string(fuzz::text_of(data, size)), keys, "input:1"); };
  if (fuzz::accepts<DataError>(read)) fuzz::require(texts.size() == keys.size(), "a text is missing");
  return 0;
}
