#include <array>

#include "checkpoint/file_io.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "checkpoint/slice_runs.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;

void check_room(std::string_view name, std::uint64_t wanted, std::size_t given) {
  TESSERA_CHECK(wanted == given, "tensor '", name, "': ", wanted, " bytes to read into a buffer of ", given);
}

}  // namespace

struct SafetensorsReader::Impl {
  std::filesystem::path path;
  File file;
  std::uint64_t file_bytes = 0;
  std::uint64_t data_begin = 0;
  SafetensorsHeader header;
  std::unordered_map<std::string_view, std::size_t> index;
};

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path, SymbolicLinks links)
    : impl_(std::make_unique<Impl>()) {
  Impl& self = *impl_;
  self.path = path;
  self.file = open_for_reading(path, links);
  self.file_bytes = size_of_file(self.file, path);
  if (self.file_bytes < 8)
    bad_file(path, "header", detail::concat("the file has only ", self.file_bytes, " bytes"), kDamagedRemedy);
  std::array<std::byte, 8> word;
  read_exactly(self.file, path, 0, word);
  const std::uint64_t header_bytes = header_length(path, word, self.file_bytes);
  std::string text(header_bytes, '\0');
  read_exactly(self.file, path, 8, std::as_writable_bytes(std::span(text.data(), text.size())));
  self.data_begin = 8 + header_bytes;
  self.header = parse_header(path, text, self.data_begin, self.file_bytes);
  for (std::size_t i = 0; i < self.header.entries.size(); ++i) self.index[self.header.entries[i].name] = i;
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;

const std::filesystem::path& SafetensorsReader::path() const { return impl_->path; }
const std::vector<SafetensorsEntry>& SafetensorsReader::entries() const { return impl_->header.entries; }
const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return impl_->header.metadata;
}
std::uint64_t SafetensorsReader::data_begin() const { return impl_->data_begin; }
std::uint64_t SafetensorsReader::file_bytes() const { return impl_->file_bytes; }

const SafetensorsEntry* SafetensorsReader::find(std::string_view name) const {
  const auto it = impl_->index.find(name);
  return it == impl_->index.end() ? nullptr : &impl_->header.entries[it->second];
}

const SafetensorsEntry& SafetensorsReader::at(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  if (!entry)
    bad_file(impl_->path, "tensor '" + std::string(name) + "'", "is not in the file",
             "Check that the file belongs to this model.");
  return *entry;
}

void SafetensorsReader::read(std::string_view name, std::span<std::byte> out) const {
  const SafetensorsEntry& entry = at(name);
  check_room(name, entry.end - entry.begin, out.size());
  read_file(entry.begin, out);
}

void SafetensorsReader::read_bytes(std::string_view name, std::uint64_t offset,
                                   std::span<std::byte> out) const {
  const SafetensorsEntry& entry = at(name);
  const std::uint64_t bytes = entry.end - entry.begin;
  TESSERA_CHECK(offset <= bytes && out.size() <= bytes - offset, "tensor '", name, "' has ", bytes,
                " bytes; ", out.size(), " from byte ", offset, " on lie outside it");
  read_file(entry.begin + offset, out);
}

void SafetensorsReader::read_rows(std::string_view name, std::int64_t begin, std::int64_t end,
                                  std::span<std::byte> out) const {
  read_slice(name, TensorSlice::rows(at(name).shape, begin, end), out);
}

void SafetensorsReader::read_slice(std::string_view name, const TensorSlice& slice,
                                   std::span<std::byte> out) const {
  const SafetensorsEntry& entry = at(name);
  check_slice(entry.name, entry.shape, slice);
  const std::size_t element = size_of(entry.dtype);
  check_room(name, static_cast<std::uint64_t>(slice.shape.numel()) * element, out.size());
  for_each_run(TensorSlice::whole(entry.shape), slice, slice, element,
               [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                 read_file(entry.begin + from, out.subspan(to, bytes));
               });
}

void SafetensorsReader::read_file(std::uint64_t offset, std::span<std::byte> out) const {
  read_exactly(impl_->file, impl_->path, offset, out);
}

}  // namespace tessera
