#include "data/documents.hpp"

#include <limits>
#include <utility>

#include "data/file.hpp"

namespace tessera {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;
constexpr std::size_t kLongestDocument = std::numeric_limits<std::int32_t>::max() - 1;
/// What one document of a packed file may take without a question, and beyond that by each byte of the file.
/// Text packs 3 to 20 times smaller; a file that packs a thousandfold is made to fill memory.
constexpr std::int64_t kUnasked = std::int64_t{64} << 20;
constexpr std::int64_t kMostPacking = 200;
constexpr const char* kByteOrderMark = "\xEF\xBB\xBF";

}  // namespace

bool is_json_lines(const std::string& path) {
  const std::string extension = text_extension(path);
  return extension == ".jsonl" || extension == ".json" || extension == ".ndjson" || is_parquet(path);
}

DocumentReader::DocumentReader(std::vector<std::string> paths, TextOptions options)
    : paths_(std::move(paths)), options_(std::move(options)) {
  for (const std::string& path : paths_) {
    bytes_.push_back(files::InputFile(path, files::Keep::nothing, "Check --input").size());
    total_bytes_ += bytes_.back();
    json_lines_.push_back(is_json_lines(path));
    any_plain_text_ = any_plain_text_ || !json_lines_.back();
  }
}

DocumentPosition DocumentReader::position() const {
  if (source_ == nullptr) return {static_cast<std::int64_t>(current_), 0, 0};
  return {static_cast<std::int64_t>(current_), line_, offset_ + static_cast<std::int64_t>(used_)};
}

void DocumentReader::seek(const DocumentPosition& position) {
  TESSERA_CHECK(source_ == nullptr && current_ == 0, "documents were read already");
  TESSERA_ENSURE(DataError, position.file >= 0 && position.file <= static_cast<std::int64_t>(paths_.size()),
                 "file ", position.file, " of ", paths_.size());
  current_ = static_cast<std::size_t>(position.file);
  for (std::size_t i = 0; i < current_; ++i) bytes_before_ += bytes_[i];
  if (position.offset == 0) return;
  open_file();
  source_->skip(position.offset);
  offset_ = position.offset;
  line_ = position.line;
}

/// Reads on behind what the buffer holds; false at the file's end.
bool DocumentReader::read_more() {
  const std::size_t before = buffer_.size();
  buffer_.resize(before + kPiece);
  buffer_.resize(before + source_->read(std::span(buffer_).subspan(before)));
  check_packing();
  return buffer_.size() > before;
}

/// Memory is taken for one document at a time: this bounds it by the file's own size.
void DocumentReader::check_packing() const {
  const std::int64_t packed = source_->packed_bytes(), size = static_cast<std::int64_t>(buffer_.size());
  if (packed < 0 || size <= kUnasked || size / kMostPacking <= packed) return;
  const std::string at = json_lines_[current_] ? detail::concat(":", line_ + 1) : "";
  detail::fail<DataError>(
      __FILE__, __LINE__, "",
      detail::concat(paths_[current_], at, ": one document unpacks to more than ", size,
                     " bytes, of a file of ", packed,
                     ": it is no text, or made to fill memory. If it is right, unpack the "
                     "file and give the unpacked one"));
}

bool DocumentReader::next_line(std::string& line) {
  std::size_t from = used_;
  for (;;) {
    const std::size_t end = buffer_.find('\n', from);
    if (end != std::string::npos) {
      line.assign(buffer_, used_, end - used_);
      used_ = end + 1;
      return true;
    }
    buffer_.erase(0, used_);
    offset_ += static_cast<std::int64_t>(std::exchange(used_, 0));
    from = buffer_.size();
    TESSERA_ENSURE(DataError, from <= kLongestDocument, paths_[current_], ":", line_ + 1,
                   ": the line is longer than 2 GiB. JSON lines hold one document each; split it");
    if (!read_more()) break;
  }
  if (buffer_.empty()) return false;
  offset_ += static_cast<std::int64_t>(buffer_.size());
  line = std::exchange(buffer_, {});
  return true;
}

void DocumentReader::read_whole(std::string& text) {
  while (read_more()) {
    TESSERA_ENSURE(DataError, buffer_.size() <= kLongestDocument, paths_[current_],
                   ": plain text is one document, which can have 2 GiB. Split the file, or use JSON lines");
  }
  text = std::exchange(buffer_, {});
  if (text.starts_with(kByteOrderMark)) text.erase(0, 3);
}

void DocumentReader::open_file() {
  source_ = open_text(paths_[current_], options_);
  line_ = 0;
  used_ = 0;
  offset_ = 0;
  buffer_.clear();
}

void DocumentReader::close_file() {
  bytes_before_ += bytes_[current_];
  source_.reset();
  ++current_;
}

bool DocumentReader::next(RawDocument& out) {
  while (current_ < paths_.size()) {
    out.file = static_cast<std::int32_t>(current_);
    if (source_ == nullptr) open_file();
    if (!json_lines_[current_]) {
      out.line = 0;
      read_whole(out.text);
      close_file();
      return true;
    }
    while (next_line(out.text)) {
      out.line = ++line_;
      if (line_ == 1 && out.text.starts_with(kByteOrderMark)) out.text.erase(0, 3);
      if (out.text.find_first_not_of(" \t\r") != std::string::npos) return true;
    }
    close_file();
  }
  return false;
}

}  // namespace tessera
