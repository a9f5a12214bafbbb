#include "engine/generation/results.hpp"

#include "engine/generation/packing.hpp"
#include "tessera/comm/bytes.hpp"

namespace tessera::generation {
namespace {

std::string packed(const std::vector<Generated>& all) {
  std::string bytes = "+";
  for (const Generated& texts : all) {
    put(bytes, texts.size());
    for (const GeneratedText& text : texts) put(bytes, text);
  }
  return bytes;
}

void unpack(const std::string& bytes, std::vector<Generated>& all) {
  Reader reader(bytes);
  char first = 0;
  reader.get(first);
  while (reader.more()) {
    std::size_t count = 0;
    reader.get(count);
    Generated& texts = all.emplace_back();
    for (std::size_t i = 0; i < count; ++i) reader.get(texts.emplace_back());
  }
}

}  // namespace

std::vector<Generated> share_results(Communicator& world, const MeshShape& shape, bool speaks,
                                     const std::string& failure, const std::vector<Generated>& own) {
  std::string mine;
  if (speaks) mine = failure.empty() ? packed(own) : "-" + failure;
  const std::vector<std::string> told = all_gather_bytes(world, mine);
  std::vector<Generated> all;
  for (const std::string& each : told) TESSERA_CHECK(each.empty() || each[0] != '-', each.substr(1));
  // By data rank, as the prompts were shared out.
  for (int dp = 0; dp < shape.dp; ++dp) {
    for (std::size_t rank = 0; rank < told.size(); ++rank) {
      if (!told[rank].empty() && coordinates_of(shape, static_cast<int>(rank)).dp == dp)
        unpack(told[rank], all);
    }
  }
  return all;
}

}  // namespace tessera::generation
