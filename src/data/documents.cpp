#include "data/documents.hpp"

#include <algorithm>
#include <filesystem>
#include <limits>

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPiece = std::size_t{1} << 20;
constexpr std::int64_t kLongestDocument = std::numeric_limits<std::int32_t>::max() - 1;

bool is_json_lines(const std::string& path) {
  const std::string extension = fs::path(path).extension().string();
  return extension == ".jsonl" || extension == ".json" || extension == ".ndjson";
}

void list_folder(const fs::path& folder, std::vector<std::string>& out) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (auto it = fs::directory_iterator(folder, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    if (!it->path().filename().string().starts_with('.')) entries.push_back(it->path());
  }
  TESSERA_ENSURE(DataError, !error, folder.string(), ": cannot be read: ", error.message());
  std::sort(entries.begin(), entries.end());
  for (const fs::path& entry : entries) {
    // A link to a folder could lead back here; it is left out.
    if (fs::is_directory(fs::symlink_status(entry, error))) {
      list_folder(entry, out);
    } else if (fs::is_regular_file(entry, error)) {
      out.push_back(entry.string());
    }
  }
}

}  // namespace

std::vector<std::string> list_inputs(std::span<const std::string> input) {
  std::vector<std::string> paths;
  for (const std::string& path : input) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      paths.push_back(path);
      continue;
    }
    const std::size_t before = paths.size();
    list_folder(path, paths);
    TESSERA_ENSURE(DataError, paths.size() > before, path, ": the folder holds no files");
  }
  return paths;
}

DocumentReader::DocumentReader(std::vector<std::string> paths) : paths_(std::move(paths)) {
  for (const std::string& path : paths_) {
    total_bytes_ += files::InputFile(path, false, "Check --input").size();
    any_plain_text_ = any_plain_text_ || !is_json_lines(path);
  }
}

bool DocumentReader::next_line(std::string& line) {
  std::size_t from = used_;
  for (;;) {
    const std::size_t end = buffer_.find('\n', from);
    if (end != std::string::npos) {
      line.assign(buffer_, used_, end - used_);
      used_ = end + 1;
      bytes_read_ += static_cast<std::int64_t>(line.size()) + 1;
      return true;
    }
    const std::int64_t left = file_->size() - offset_;
    if (left == 0) break;
    buffer_.erase(0, used_);
    used_ = 0;
    from = buffer_.size();
    TESSERA_ENSURE(DataError, from <= static_cast<std::size_t>(kLongestDocument), file_->path(), ":",
                   line_ + 1, ": the line is longer than 2 GiB. JSON lines hold one document each; split it");
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(left, kPiece));
    buffer_.resize(from + count);
    file_->read(offset_, std::as_writable_bytes(std::span(buffer_).subspan(from)));
    offset_ += static_cast<std::int64_t>(count);
  }
  if (used_ == buffer_.size()) return false;
  line.assign(buffer_, used_);
  used_ = buffer_.size();
  bytes_read_ += static_cast<std::int64_t>(line.size());
  return true;
}

void DocumentReader::read_whole(std::string& text) {
  TESSERA_ENSURE(
      DataError, file_->size() <= kLongestDocument, file_->path(), ": ", file_->size(),
      " bytes of plain text are one document, which can have 2 GiB. Split the file, or use JSON lines");
  text.resize(static_cast<std::size_t>(file_->size()));
  file_->read(0, std::as_writable_bytes(std::span(text)));
  bytes_read_ += file_->size();
}

bool DocumentReader::next(RawDocument& out) {
  for (; current_ < paths_.size(); ++current_, file_.reset()) {
    const std::string& path = paths_[current_];
    out.file = static_cast<std::int32_t>(current_);
    if (!is_json_lines(path)) {
      file_ = std::make_unique<files::InputFile>(path, false);
      out.line = 0;
      read_whole(out.text);
      file_.reset();
      ++current_;
      return true;
    }
    if (file_ == nullptr) {
      file_ = std::make_unique<files::InputFile>(path, false);
      offset_ = line_ = 0;
      used_ = 0;
      buffer_.clear();
    }
    while (next_line(out.text)) {
      out.line = ++line_;
      if (line_ == 1 && out.text.starts_with("\xEF\xBB\xBF")) out.text.erase(0, 3);  // a byte order mark
      if (out.text.find_first_not_of(" \t\r") != std::string::npos) return true;
    }
  }
  return false;
}

std::int64_t first_invalid_utf8(const std::string& text) {
  const auto* s = reinterpret_cast<const unsigned char*>(text.data());
  const std::size_t n = text.size();
  const auto follows = [&](std::size_t i) { return i < n && (s[i] & 0xC0) == 0x80; };
  for (std::size_t i = 0; i < n;) {
    const unsigned char c = s[i];
    std::size_t length = 1;
    bool good = c < 0x80;
    if (c >= 0xC2 && c <= 0xDF) {
      length = 2;
      good = follows(i + 1);
    } else if (c >= 0xE0 && c <= 0xEF) {
      length = 3;  // no overlong forms, no surrogates
      good = follows(i + 1) && follows(i + 2) && (c != 0xE0 || s[i + 1] >= 0xA0) &&
             (c != 0xED || s[i + 1] < 0xA0);
    } else if (c >= 0xF0 && c <= 0xF4) {
      length = 4;  // no overlong forms, nothing above U+10FFFF
      good = follows(i + 1) && follows(i + 2) && follows(i + 3) && (c != 0xF0 || s[i + 1] >= 0x90) &&
             (c != 0xF4 || s[i + 1] < 0x90);
    }
    if (!good) return static_cast<std::int64_t>(i);
    i += length;
  }
  return -1;
}

}  // namespace tessera
