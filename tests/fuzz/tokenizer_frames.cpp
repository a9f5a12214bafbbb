/// What a tokenizer's worker answers: frames, and in them the ids of texts.

#include <cstring>

#include "data/python_tokenizer.hpp"
#include "fuzz.hpp"
#include "tessera/base/error.hpp"

using namespace tessera;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::size_t texts = data[0] % 8;
  std::span<const std::uint8_t> rest(data + 1, size - 1);
  const auto take = [&](std::span<std::byte> out) {
    TESSERA_ENSURE(IoError, out.size() <= rest.size(), "the worker process ended");
    if (!out.empty()) std::memcpy(out.data(), rest.data(), out.size());
    rest = rest.subspan(out.size());
  };
  bool more = true;
  while (more && !rest.empty()) {
    Frame frame;
    more = fuzz::accepts<IoError>([&] { more = read_frame(take, frame); }) && more;
    if (!more) break;
    std::vector<std::vector<std::int32_t>> ids;
    if (!fuzz::accepts<DataError>([&] { ids = parse_ids(frame.payload, texts, 1000); })) continue;
    std::size_t count = 0;
    for (const auto& text : ids) count += text.size();
    fuzz::require(ids.size() == texts && 4 + 4 * texts + 4 * count == frame.payload.size(),
                  "ids do not fill the answer");
  }
  return 0;
}
