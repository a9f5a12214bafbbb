#include "checkpoint/file_io.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera {

std::vector<SafetensorsTensor> safetensors_in_memory(std::span<const std::byte> file,
                                                     const std::string& origin) {
  using namespace checkpoint_detail;
  if (file.size() < 8)
    bad_file(origin, "header", detail::concat("the file has only ", file.size(), " bytes"), kDamagedRemedy);
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 8; i-- > 0;)
    header_bytes = header_bytes << 8 | std::to_integer<std::uint64_t>(file[i]);
  if (header_bytes > kMaxHeaderBytes || header_bytes > file.size() - 8)
    bad_file(origin, "header",
             detail::concat("it claims a header of ", header_bytes, " bytes; the file has ", file.size(),
                            " and a header at most ", kMaxHeaderBytes),
             kDamagedRemedy);
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8, header_bytes);
  SafetensorsHeader header = parse_header(origin, text, 8 + header_bytes, file.size(), ElementTypes::all);
  std::vector<SafetensorsTensor> tensors;
  for (const SafetensorsEntry& entry : header.entries) {
    auto& [type, dims] = header.declared.at(entry.name);
    tensors.push_back({entry.name, type, std::move(dims), entry.begin, entry.end});
  }
  return tensors;
}

}  // namespace tessera
