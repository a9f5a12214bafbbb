#pragma once
/// Reads documents out of JSON-lines and plain text files, piece by piece.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/file.hpp"

namespace tessera {

/// A document as it lies in its file.
struct RawDocument {
  std::int32_t file = 0;
  std::int64_t line = 0;  ///< from 1; 0 = the whole file is the document
  std::string text;       ///< a line of JSON, or plain text
};

/// Files and, below folders, all files that are not hidden, in the order of names. Errors: DataError when one
/// is missing or a folder holds none.
std::vector<std::string> list_inputs(std::span<const std::string> input);

/// Goes through files one document at a time.
class DocumentReader {
 public:
  /// Errors: DataError if a file cannot be opened.
  explicit DocumentReader(std::vector<std::string> paths);

  /// The next document; false at the end. Blank lines are left out. Errors: DataError, IoError.
  bool next(RawDocument& out);
  const std::string& path(std::int32_t file) const { return paths_[static_cast<std::size_t>(file)]; }
  std::int64_t bytes_read() const { return bytes_read_; }
  std::int64_t total_bytes() const { return total_bytes_; }
  bool any_plain_text() const { return any_plain_text_; }

 private:
  bool next_line(std::string& line);
  void read_whole(std::string& text);

  std::vector<std::string> paths_;
  std::size_t current_ = 0;
  std::unique_ptr<files::InputFile> file_;
  std::int64_t offset_ = 0;  ///< of the first byte not yet in the buffer
  std::int64_t line_ = 0;
  std::string buffer_;
  std::size_t used_ = 0;
  std::int64_t bytes_read_ = 0;
  std::int64_t total_bytes_ = 0;
  bool any_plain_text_ = false;
};

/// The strings under `keys` of a line of JSON. Errors: DataError beginning with `place`.
std::vector<std::string> json_texts(const std::string& line, std::span<const std::string> keys,
                                    const std::string& place);

/// Offset of the first byte that is not UTF-8, or -1.
std::int64_t first_invalid_utf8(const std::string& text);

}  // namespace tessera
