#include "data/npy.hpp"

#include "data/file.hpp"

namespace tessera::npy {
namespace {

/// Magic, version, header length and the dictionary, padded so that the data begins on a multiple of 64.
std::string header(const Layout& layout) {
  std::string shape;
  for (const std::int64_t dim : layout.shape) {
    if (!shape.empty()) shape += ' ';
    shape += std::to_string(dim);
    shape += ',';
  }
  if (layout.shape.size() > 1) shape.pop_back();
  const char* type = layout.dtype == DType::i32 ? "<i4" : layout.dtype == DType::u32 ? "<u4" : "<i8";
  std::string text =
      detail::concat("{'descr': '", type, "', 'fortran_order': False, 'shape': (", shape, "), }");
  const std::size_t prefix = 10;
  text.append(63 - (prefix + text.size()) % 64, ' ');
  text += '\n';
  std::string out("\x93NUMPY\x01\x00", 8);
  out += static_cast<char>(text.size() & 255);
  out += static_cast<char>(text.size() >> 8);
  return out + text;
}

}  // namespace

std::int64_t Layout::numel() const {
  std::int64_t n = 1;
  for (const std::int64_t dim : shape) n *= dim;
  return n;
}

void save(const std::string& path, const IntArray& array, const Layout& layout) {
  TESSERA_ENSURE(InternalError, array.size() == layout.numel() && array.dtype() == layout.dtype, path);
  files::OutputFile file(path);
  file.write(header(layout));
  array.for_each_piece([&](std::span<const std::byte> piece) { file.write(piece); });
  file.publish(false);
}

IntArray load(const std::string& path, const Layout& layout) {
  return load(std::make_shared<files::InputFile>(path, files::Keep::small), layout);
}

IntArray load(std::shared_ptr<const files::InputFile> file, const Layout& layout) {
  const std::string expected = header(layout);
  const auto begin = static_cast<std::int64_t>(expected.size());
  const std::int64_t bytes = layout.numel() * static_cast<std::int64_t>(size_of(layout.dtype));
  TESSERA_ENSURE(DataError, file->size() == begin + bytes, file->path(), ": has ", file->size(),
                 " bytes, not ", begin + bytes);
  std::string found(expected.size(), '\0');
  file->read(0, std::as_writable_bytes(std::span(found)));
  TESSERA_ENSURE(DataError, found == expected, file->path(), ": its header is not the expected one");
  return IntArray(std::move(file), begin, layout.numel(), layout.dtype);
}

}  // namespace tessera::npy
