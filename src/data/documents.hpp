#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/text_source.hpp"

namespace tessera {

/// A document as it lies in its file.
struct RawDocument {
  std::int32_t file = 0;
  std::int64_t line = 0;  ///< from 1; 0 = the whole file is the document
  std::string text;       ///< a line of JSON, or plain text; without a byte order mark
};

struct InputFiles {
  std::vector<std::string> paths;
  std::vector<std::string> notes;  ///< what a user should know: files passed over, or read in an unlikely way
};

/// Files, what matches a pattern such as "a/*.jsonl" and, below folders, all files that are not hidden, in
/// the order of names. Files that are no text are passed over in folders. Errors: DataError when one is
/// missing or, named itself, no text; when a folder holds none, or nothing matches.
InputFiles list_inputs(std::span<const std::string> input);

/// Whether a file holds one JSON object a line, as its name says, or is Parquet, whose rows are read so.
bool is_json_lines(const std::string& path);

/// Between two documents.
struct DocumentPosition {
  std::int64_t file = 0;
  std::int64_t line = 0;    ///< lines of the file that are read
  std::int64_t offset = 0;  ///< their bytes, unpacked
};

/// Goes through files one document at a time.
class DocumentReader {
 public:
  /// Errors: DataError if a file cannot be opened.
  explicit DocumentReader(std::vector<std::string> paths, TextOptions options = {});

  /// The next document; false at the end. Blank lines are left out. Errors: DataError, IoError.
  bool next(RawDocument& out);
  DocumentPosition position() const;
  /// Goes on from where another reader of the same files was. Errors: as next.
  void seek(const DocumentPosition& position);
  const std::string& path(std::int32_t file) const { return paths_[static_cast<std::size_t>(file)]; }
  /// Of the files as they lie on the disk.
  std::int64_t bytes_read() const { return bytes_before_ + (source_ ? source_->consumed() : 0); }
  std::int64_t total_bytes() const { return total_bytes_; }
  bool any_plain_text() const { return any_plain_text_; }

 private:
  bool next_line(std::string& line);
  void read_whole(std::string& text);
  bool read_more();
  void check_packing() const;
  void open_file();
  void close_file();

  std::vector<std::string> paths_;
  TextOptions options_;
  std::vector<bool> json_lines_;
  std::vector<std::int64_t> bytes_;
  std::size_t current_ = 0;
  std::unique_ptr<TextSource> source_;
  std::int64_t line_ = 0;
  std::string buffer_;
  std::size_t used_ = 0;
  std::int64_t offset_ = 0;        ///< of `buffer_` in the file, unpacked
  std::int64_t bytes_before_ = 0;  ///< of the files that are done
  std::int64_t total_bytes_ = 0;
  bool any_plain_text_ = false;
};

/// The strings under `keys` of a line of JSON. Errors: DataError beginning with `place`.
std::vector<std::string> json_texts(const std::string& line, std::span<const std::string> keys,
                                    const std::string& place);

/// Offset of the first byte that is not UTF-8, or -1.
std::int64_t first_invalid_utf8(const std::string& text);

}  // namespace tessera
