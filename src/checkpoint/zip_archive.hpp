#pragma once
/// Zip archives of stored (not compressed) entries, as PyTorch writes its files: read within a part of a
/// file, and written entry by entry.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/file_io.hpp"

namespace tessera::checkpoint_detail {

class ZipReader {
 public:
  struct Entry {
    std::string name;
    std::uint64_t header = 0;  ///< where its local header is, from the start of the archive
    std::uint64_t bytes = 0;
  };

  /// The archive in bytes [begin, end) of `file`, which outlives it. Errors: CheckpointError naming `origin`
  /// and what is damaged, compressed, encrypted, twice there or outside of the archive; IoError.
  ZipReader(const File& file, std::filesystem::path origin, std::uint64_t begin, std::uint64_t end);

  const std::vector<Entry>& entries() const { return entries_; }
  /// The entry, or null.
  const Entry* find(std::string_view name) const;
  /// Reads bytes [offset, offset + out.size()) of an entry.
  void read(const Entry& entry, std::uint64_t offset, std::span<std::byte> out) const;

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& reason) const;
  void read_archive(std::uint64_t at, std::span<std::byte> out) const;
  void find_directory();
  void read_directory(std::uint64_t at, std::uint64_t bytes, std::uint64_t count);

  const File& file_;
  std::filesystem::path origin_;
  std::uint64_t begin_, size_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string_view, std::size_t> by_name_;
};

/// Writes entries one after the other, each aligned to 64 bytes, with its CRC. Several archives may lie back
/// to back in one file.
class ZipWriter {
 public:
  /// Errors: IoError.
  explicit ZipWriter(std::filesystem::path path);
  /// Begins an entry of exactly so many bytes.
  void begin(const std::string& name, std::uint64_t bytes);
  void append(std::span<const std::byte> bytes);
  /// An entry at once.
  void add(const std::string& name, std::span<const std::byte> bytes);
  /// The directory. What is added after it is of another archive. Returns how many bytes the archive has.
  std::uint64_t end_archive();
  /// Where in the file the archive begins that is being written.
  std::uint64_t begin_of_archive() const { return begin_; }
  void sync();

 private:
  struct Entry {
    std::string name;
    std::uint64_t header = 0, bytes = 0;
    std::uint32_t crc = 0;
  };
  void write(std::span<const std::byte> bytes);
  void close_entry();

  std::filesystem::path path_;
  File file_;
  std::uint64_t begin_ = 0, at_ = 0, left_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace tessera::checkpoint_detail
