#pragma once
/// Files as the data floor needs them: a bounds-checked input that is mapped or read, an output that appears
/// under its name only when complete, and a fast content hash.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera::files {

/// "No such file or directory" and the like, for errno value `code`.
std::string reason(int code);

/// A regular file opened for reading, mapped into memory or read piecewise.
class InputFile {
 public:
  /// `remedy` is appended to the message when the file is not there. Errors: DataError.
  InputFile(const std::string& path, bool map, const std::string& remedy = "");
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }
  /// The mapped bytes; null when the file is not mapped or empty.
  const std::byte* data() const { return data_; }
  /// Copies bytes [offset, offset + out.size()). Errors: DataError beyond the end, IoError when the system
  /// refuses.
  void read(std::int64_t offset, std::span<std::byte> out) const;
  /// Errors: DataError if the file no longer has the size it was opened with (a shrunken mapping would
  /// fault).
  void check_unchanged() const;

 private:
  std::string path_;
  int fd_ = -1;
  std::int64_t size_ = 0;
  const std::byte* data_ = nullptr;
};

/// A file written under a temporary name next to its final one, synced and renamed by publish().
class OutputFile {
 public:
  /// Errors: IoError if the temporary file cannot be created.
  explicit OutputFile(std::string path);
  /// Removes the temporary file unless published.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Appends bytes. Errors: IoError (for instance: disk full).
  void write(std::span<const std::byte> bytes);
  void write(const std::string& text) { write(std::as_bytes(std::span(text))); }
  template <typename T>
  void write_value(const T& value) {
    write(std::as_bytes(std::span(&value, 1)));
  }
  std::int64_t size() const { return written_; }
  /// Flushes and syncs the bytes to the disk, still under the temporary name. Errors: IoError.
  void sync();
  /// Renames to the final name; before and after, a durable file is synced with its folder. Errors: IoError.
  void publish(bool durable = true);

 private:
  void flush();

  std::string path_;
  std::string temporary_;
  int fd_ = -1;
  std::int64_t written_ = 0;
  std::vector<std::byte> buffer_;
};

/// 16 hexadecimal digits.
std::string hex(std::uint64_t value);

}  // namespace tessera::files
