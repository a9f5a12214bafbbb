#include "checkpoint/zip_archive.hpp"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace tessera::checkpoint_detail {
namespace {

constexpr std::uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50,
                        kLocator64 = 0x07064b50;
constexpr std::uint64_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kLocatorBytes = 20,
                        kEnd64Bytes = 56;
constexpr std::uint64_t kMostComment = 65535, kMostDirectory = 256u << 20;
constexpr std::uint16_t kZip64Extra = 1;
constexpr std::uint16_t kPaddingExtra = 0x4246;  // "FB", as PyTorch pads
constexpr std::uint64_t kAlignment = 64;

std::uint64_t field(std::span<const std::byte> bytes, std::size_t at, std::size_t width) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + at, width);
  return value;
}

/// Little-endian fields, one after the other.
class Fields {
 public:
  Fields& put(std::uint64_t value, std::size_t width) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), first, first + width);
    return *this;
  }
  Fields& put(std::string_view text) {
    const auto* first = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), first, first + text.size());
    return *this;
  }
  Fields& zeros(std::uint64_t count) {
    bytes_.resize(bytes_.size() + static_cast<std::size_t>(count));
    return *this;
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// The value of a 32-bit field: its 64-bit form in the extra field where it is all ones.
std::uint64_t wide(std::uint64_t value, std::span<const std::byte> zip64, std::size_t& used) {
  if (value != 0xffffffffu) return value;
  if (zip64.size() < used + 8) return UINT64_MAX;  // fits nowhere
  used += 8;
  return field(zip64, used - 8, 8);
}

std::span<const std::byte> zip64_extra(std::span<const std::byte> extra) {
  while (extra.size() >= 4) {
    const auto size = static_cast<std::size_t>(field(extra, 2, 2));
    if (size > extra.size() - 4) break;
    if (field(extra, 0, 2) == kZip64Extra) return extra.subspan(4, size);
    extra = extra.subspan(4 + size);
  }
  return {};
}

}  // namespace

ZipReader::ZipReader(const File& file, std::filesystem::path origin, std::uint64_t begin, std::uint64_t end)
    : file_(file), origin_(std::move(origin)), begin_(begin), size_(end - begin) {
  find_directory();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!by_name_.emplace(entries_[i].name, i).second)
      fail("entry '" + entries_[i].name + "'", "is there twice");
  }
}

void ZipReader::fail(const std::string& where, const std::string& reason) const {
  bad_file(origin_, where, reason,
           "It is damaged or not a file that PyTorch 1.6 or later saved; older ones have to be saved anew "
           "with it.");
}

void ZipReader::read_archive(std::uint64_t at, std::span<std::byte> out) const {
  if (at > size_ || out.size() > size_ - at) fail("", "part of it lies outside of it");
  read_exactly(file_, origin_, begin_ + at, out);
}

void ZipReader::find_directory() {
  if (size_ < kEndBytes) fail("", "it is too short for a zip archive");
  std::vector<std::byte> tail(static_cast<std::size_t>(std::min(size_, kEndBytes + kMostComment)));
  const std::uint64_t first = size_ - tail.size();
  read_archive(first, tail);
  std::size_t at = tail.size() - kEndBytes;
  while (field(tail, at, 4) != kEnd || field(tail, at + 20, 2) != tail.size() - at - kEndBytes) {
    if (at == 0) fail("", "it has no directory, as a zip archive has at its end");
    --at;
  }
  std::uint64_t count = field(tail, at + 10, 2), bytes = field(tail, at + 12, 4),
                place = field(tail, at + 16, 4);
  const std::uint64_t end = first + at;
  std::vector<std::byte> locator(kLocatorBytes);
  if (end >= kLocatorBytes) {
    read_archive(end - kLocatorBytes, locator);
    if (field(locator, 0, 4) == kLocator64) {
      std::vector<std::byte> wide_end(kEnd64Bytes);
      read_archive(field(locator, 8, 8), wide_end);
      if (field(wide_end, 0, 4) != kEnd64) fail("", "its 64-bit directory is not where it should be");
      count = field(wide_end, 32, 8);
      bytes = field(wide_end, 40, 8);
      place = field(wide_end, 48, 8);
    }
  }
  read_directory(place, bytes, count);
}

void ZipReader::read_directory(std::uint64_t at, std::uint64_t bytes, std::uint64_t count) {
  if (bytes > std::min(size_, kMostDirectory)) fail("directory", "is larger than it can be");
  std::vector<std::byte> all(static_cast<std::size_t>(bytes));
  read_archive(at, all);
  std::span<const std::byte> left = all;
  for (; count > 0; --count) {
    if (left.size() < kCentralBytes || field(left, 0, 4) != kCentral) fail("directory", "is cut short");
    const auto name = static_cast<std::size_t>(field(left, 28, 2)),
               extra = static_cast<std::size_t>(field(left, 30, 2)),
               comment = static_cast<std::size_t>(field(left, 32, 2));
    if (left.size() - kCentralBytes < name + extra + comment) fail("directory", "is cut short");
    Entry entry;
    entry.name.assign(reinterpret_cast<const char*>(left.data()) + kCentralBytes, name);
    const std::string where = "entry '" + entry.name + "'";
    if ((field(left, 8, 2) & 1) != 0) fail(where, "is encrypted");
    if (field(left, 10, 2) != 0) fail(where, "is compressed");
    const auto zip64 = zip64_extra(left.subspan(kCentralBytes + name, extra));
    std::size_t used = 0;
    entry.bytes = wide(field(left, 24, 4), zip64, used);
    const std::uint64_t packed = wide(field(left, 20, 4), zip64, used);
    entry.header = wide(field(left, 42, 4), zip64, used);
    if (packed != entry.bytes) fail(where, "has two sizes");
    if (entry.header > size_ || size_ - entry.header < kLocalBytes ||
        entry.bytes > size_ - entry.header - kLocalBytes)
      fail(where, "lies outside of the file");
    entries_.push_back(std::move(entry));
    left = left.subspan(kCentralBytes + name + extra + comment);
  }
}

const ZipReader::Entry* ZipReader::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

void ZipReader::read(const Entry& entry, std::uint64_t offset, std::span<std::byte> out) const {
  if (offset > entry.bytes || out.size() > entry.bytes - offset)
    fail("entry '" + entry.name + "'", detail::concat("has ", entry.bytes, " bytes; more are needed"));
  std::array<std::byte, kLocalBytes> local;
  read_archive(entry.header, local);
  if (field(local, 0, 4) != kLocal) fail("entry '" + entry.name + "'", "is not where the directory says");
  read_archive(entry.header + kLocalBytes + field(local, 26, 2) + field(local, 28, 2) + offset, out);
}

ZipWriter::ZipWriter(std::filesystem::path path) : path_(std::move(path)), file_(create_file(path_)) {}

void ZipWriter::write(std::span<const std::byte> bytes) {
  write_exactly(file_, path_, at_, bytes, bytes.size());
  at_ += bytes.size();
}

void ZipWriter::begin(const std::string& name, std::uint64_t bytes) {
  TESSERA_CHECK(left_ == 0, "entry '", entries_.back().name, "' lacks ", left_, " bytes");
  close_entry();
  entries_.push_back({name, at_, bytes, static_cast<std::uint32_t>(::crc32_z(0, nullptr, 0))});
  constexpr std::uint64_t kZip64 = 20, kPaddingHeader = 4;
  const std::uint64_t before = at_ + kLocalBytes + name.size() + kZip64 + kPaddingHeader;
  const std::uint64_t padding = (kAlignment - before % kAlignment) % kAlignment;
  Fields header;
  header.put(kLocal, 4).put(45, 2).put(0, 2).put(0, 2).put(0, 4).put(0, 4);
  header.put(0xffffffffu, 4)
      .put(0xffffffffu, 4)
      .put(name.size(), 2)
      .put(kZip64 + kPaddingHeader + padding, 2);
  header.put(name).put(kZip64Extra, 2).put(16, 2).put(bytes, 8).put(bytes, 8);
  header.put(kPaddingExtra, 2).put(padding, 2).zeros(padding);
  write(header.bytes());
  left_ = bytes;
}

void ZipWriter::append(std::span<const std::byte> bytes) {
  TESSERA_CHECK(bytes.size() <= left_, "entry '", entries_.back().name, "' gets ", bytes.size() - left_,
                " bytes too many");
  left_ -= bytes.size();
  Entry& entry = entries_.back();
  constexpr std::size_t kStep = 1 << 20;  // what was summed up is still in the cache when it is written
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kStep, bytes.size()))) {
    const std::span<const std::byte> step = bytes.first(std::min(kStep, bytes.size()));
    entry.crc = static_cast<std::uint32_t>(
        ::crc32_z(entry.crc, reinterpret_cast<const Bytef*>(step.data()), step.size()));
    write(step);
  }
}

/// Its CRC is known only now.
void ZipWriter::close_entry() {
  if (entries_.empty()) return;
  Fields crc;
  crc.put(entries_.back().crc, 4);
  write_exactly(file_, path_, entries_.back().header + 14, crc.bytes(), 4);
}

void ZipWriter::add(const std::string& name, std::span<const std::byte> bytes) {
  begin(name, bytes.size());
  append(bytes);
}

std::uint64_t ZipWriter::end_archive() {
  TESSERA_CHECK(left_ == 0, "entry '", entries_.back().name, "' lacks ", left_, " bytes");
  close_entry();
  const std::uint64_t directory = at_ - begin_;
  Fields all;
  for (const Entry& entry : entries_) {
    constexpr std::uint64_t kZip64 = 28;
    all.put(kCentral, 4).put(45, 2).put(45, 2).put(0, 2).put(0, 2).put(0, 4).put(entry.crc, 4);
    all.put(0xffffffffu, 4).put(0xffffffffu, 4).put(entry.name.size(), 2).put(kZip64, 2).put(0, 2).put(0, 2);
    all.put(0, 2).put(0, 4).put(0xffffffffu, 4).put(entry.name);
    all.put(kZip64Extra, 2).put(24, 2).put(entry.bytes, 8).put(entry.bytes, 8).put(entry.header - begin_, 8);
  }
  write(all.bytes());
  const std::uint64_t end64 = at_ - begin_, bytes = end64 - directory, count = entries_.size();
  Fields end;
  end.put(kEnd64, 4).put(kEnd64Bytes - 12, 8).put(45, 2).put(45, 2).put(0, 4).put(0, 4);
  end.put(count, 8).put(count, 8).put(bytes, 8).put(directory, 8);
  end.put(kLocator64, 4).put(0, 4).put(end64, 8).put(1, 4);
  end.put(kEnd, 4)
      .put(0, 2)
      .put(0, 2)
      .put(0xffff, 2)
      .put(0xffff, 2)
      .put(0xffffffffu, 4)
      .put(0xffffffffu, 4)
      .put(0, 2);
  write(end.bytes());
  entries_.clear();
  return at_ - std::exchange(begin_, at_);
}

void ZipWriter::sync() { sync_file(file_, path_); }

}  // namespace tessera::checkpoint_detail
