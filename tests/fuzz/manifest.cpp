/// A checkpoint's manifest.json. Its checksum is put right first, or nothing would come further than that.

#include <zlib.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "fuzz.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/manifest.hpp"

using namespace tessera;

namespace {

std::string with_checksum(std::string_view text) {
  using Json = nlohmann::json;
  Json manifest = Json::parse(text, nullptr, false);
  if (!manifest.is_object() || !manifest.contains("checksum")) return std::string(text);
  manifest.erase("checksum");
  const auto printed = [&] { return manifest.dump(-1, ' ', false, Json::error_handler_t::replace); };
  const std::string covered = printed();
  const auto sum = ::crc32_z(0, reinterpret_cast<const Bytef*>(covered.data()), covered.size());
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08lx", sum);
  manifest["checksum"] = digits;
  return printed();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = fuzz::text_of(data, size);
  Manifest manifest;
  const auto read = [&](std::string_view from) {
    return fuzz::accepts<CheckpointError>([&] { manifest = parse_manifest(from, "input"); });
  };
  if (!read(text) && !read(with_checksum(text))) return 0;
  const std::string written = to_json(manifest);
  manifest = parse_manifest(written, "what was written");
  fuzz::require(to_json(manifest) == written, "what was read is not read back the same");
  return 0;
}
