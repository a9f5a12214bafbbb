#include <fcntl.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>

#include "checkpoint/file_io.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera {

using namespace checkpoint_detail;

struct SafetensorsWriter::Impl {
  std::filesystem::path path;
  std::filesystem::path staging;
  File file;
  Options options;
  SafetensorsLayout layout;
  std::unordered_map<std::string_view, std::size_t> index;
  std::vector<std::uint64_t> written;  ///< bytes so far, per entry
  std::vector<std::vector<std::uint32_t>> crc;
  std::size_t unfinished = 0;
  bool renamed = false;

  ~Impl() {
    std::error_code ignored;
    if (file.is_open() && !renamed) std::filesystem::remove(staging, ignored);
  }

  /// Takes the room on the disk before hours of data arrive. File systems that cannot do so are no error.
  void reserve() const {
    if (::fallocate(file.fd(), 0, 0, static_cast<off_t>(layout.file_bytes)) == 0) return;
    if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO)
      io_failed("make room for", path, errno, layout.file_bytes);
  }

  void add_to_crc(std::size_t entry, std::span<const std::byte> bytes) {
    std::uint64_t at = written[entry];
    while (!bytes.empty()) {
      const std::size_t chunk = at / options.chunk_bytes;
      if (chunk == crc[entry].size()) crc[entry].push_back(0);
      const std::size_t part =
          std::min<std::uint64_t>(bytes.size(), options.chunk_bytes - at % options.chunk_bytes);
      crc[entry][chunk] = static_cast<std::uint32_t>(
          ::crc32_z(crc[entry][chunk], reinterpret_cast<const Bytef*>(bytes.data()), part));
      at += part;
      bytes = bytes.subspan(part);
    }
  }
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorSpec> tensors)
    : SafetensorsWriter(path, tensors, Options{}) {}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorSpec> tensors,
                                     Options options)
    : impl_(std::make_unique<Impl>()) {
  Impl& self = *impl_;
  self.path = path;
  self.staging = incomplete_name(path);
  self.options = std::move(options);
  self.layout = lay_out(tensors, self.options.metadata);
  for (std::size_t i = 0; i < self.layout.entries.size(); ++i) {
    self.index[self.layout.entries[i].name] = i;
    if (self.layout.entries[i].end > self.layout.entries[i].begin) ++self.unfinished;
  }
  self.written.resize(self.layout.entries.size());
  self.crc.resize(self.layout.entries.size());
  self.file = create_file(self.staging);
  self.reserve();
  write_exactly(self.file, path, 0,
                std::as_bytes(std::span(self.layout.prefix.data(), self.layout.prefix.size())),
                self.layout.file_bytes);
}

SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;

void SafetensorsWriter::append(std::string_view name, std::span<const std::byte> bytes) {
  Impl& self = *impl_;
  const auto it = self.index.find(name);
  TESSERA_CHECK(it != self.index.end(), self.path.string(), " was not laid out with a tensor '", name, "'");
  const SafetensorsEntry& entry = self.layout.entries[it->second];
  const std::uint64_t left = entry.end - entry.begin - self.written[it->second];
  TESSERA_CHECK(bytes.size() <= left, "tensor '", name, "' lacks ", left, " bytes; ", bytes.size(),
                " were given");
  if (bytes.empty()) return;
  const bool last = bytes.size() == left;
  // In blocks that are still in the cache when they are written.
  for (constexpr std::size_t kBlock = std::size_t{4} << 20; !bytes.empty();) {
    const auto block = bytes.first(std::min(kBlock, bytes.size()));
    if (self.options.chunk_bytes > 0) self.add_to_crc(it->second, block);
    write_exactly(self.file, self.path, entry.begin + self.written[it->second], block,
                  self.layout.file_bytes);
    self.written[it->second] += block.size();
    bytes = bytes.subspan(block.size());
  }
  if (last) --self.unfinished;
}

bool SafetensorsWriter::complete() const { return impl_->unfinished == 0; }

SafetensorsSummary SafetensorsWriter::finish() {
  Impl& self = *impl_;
  SafetensorsSummary summary;
  for (std::size_t i = 0; i < self.layout.entries.size(); ++i) {
    const SafetensorsEntry& entry = self.layout.entries[i];
    TESSERA_CHECK(self.written[i] == entry.end - entry.begin, self.path.string(), ": tensor '", entry.name,
                  "' got ", self.written[i], " of its ", entry.end - entry.begin, " bytes");
    summary.tensors.push_back({entry.name, entry.begin, entry.end, self.crc[i]});
  }
  sync_file(self.file, self.path);
  rename_path(self.staging, self.path);
  self.renamed = true;
  self.file.close();
  const std::string& prefix = self.layout.prefix;
  summary.file_bytes = self.layout.file_bytes;
  summary.header_bytes = prefix.size();
  summary.header_crc32 =
      static_cast<std::uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(prefix.data()), prefix.size()));
  return summary;
}

}  // namespace tessera
