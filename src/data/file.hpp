#pragma once
/// Files as the data floor needs them: a bounds-checked input that is read where it lies or kept in memory,
/// and an output that appears under its name only when complete.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"

namespace tessera::files {

/// "No such file or directory" and the like, for errno value `code`.
std::string reason(int code);

enum class Keep {
  nothing,  ///< every read goes to the file
  small,    ///< a file of at most kKeptBytes is read once, when it is opened; a larger one as `nothing`
  all       ///< read once, whatever its size
};
constexpr std::int64_t kKeptBytes = std::int64_t{64} << 20;

/// A regular file opened for reading. It is never mapped: where a mapped file shrinks, or its disk fails, the
/// process gets a signal, not an error. Safe to use from several threads.
class InputFile {
 public:
  /// `remedy` is appended to the message when the file is not there. Errors: DataError.
  InputFile(const std::string& path, Keep keep, const std::string& remedy = "");
  /// `bytes` as a file that was kept.
  InputFile(std::string path, std::span<const std::byte> bytes);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }
  /// The bytes of a file that is kept; else null.
  const std::byte* data() const { return kept_.get(); }
  /// Copies bytes [offset, offset + out.size()). Errors: DataError beyond the end, also when the file has
  /// shrunk since it was opened; IoError when the system refuses.
  void read(std::int64_t offset, std::span<std::byte> out) const;
  /// The little-endian value at `offset`. Errors: as read.
  template <typename T>
  T value(std::int64_t offset) const {
    T out;
    read(offset, std::as_writable_bytes(std::span(&out, 1)));
    return out;
  }
  /// Errors: DataError if the file no longer has the size it was opened with. One that is kept stays as it
  /// was.
  void check_unchanged() const;

 private:
  void read_from_disk(std::int64_t offset, std::span<std::byte> out) const;

  std::string path_;
  int fd_ = -1;
  std::int64_t size_ = 0;
  std::unique_ptr<std::byte, void (*)(void*)> kept_;
};

/// A file written under a temporary name next to its final one, synced and renamed by publish().
class OutputFile {
 public:
  /// Errors: IoError if the temporary file cannot be created.
  explicit OutputFile(std::string path);
  /// With a temporary file that stays where it is until published. It goes on behind its first `size` bytes;
  /// what it has beyond is cut off. Errors: IoError; DataError if it has less.
  OutputFile(std::string path, std::string temporary, std::int64_t size);
  /// Removes the temporary file unless it was published or named.
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
  bool kept_ = false;
  std::int64_t written_ = 0;
  std::vector<std::byte> buffer_;
};

/// 16 hexadecimal digits.
std::string hex(std::uint64_t value);

}  // namespace tessera::files
