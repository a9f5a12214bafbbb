#include <glob.h>

#include <algorithm>
#include <filesystem>

#include "data/documents.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Bytes of the UTF-8 character at `i`, or 0 if there is none.
std::size_t character_at(const std::string& text, std::size_t i) {
  const auto* s = reinterpret_cast<const unsigned char*>(text.data());
  const auto follows = [&](std::size_t k) { return k < text.size() && (s[k] & 0xC0) == 0x80; };
  const unsigned char c = s[i];
  if (c < 0x80) return 1;
  if (c >= 0xC2 && c <= 0xDF) return follows(i + 1) ? 2 : 0;
  if (c >= 0xE0 && c <= 0xEF) {  // no overlong forms, no surrogates
    const bool good =
        follows(i + 1) && follows(i + 2) && (c != 0xE0 || s[i + 1] >= 0xA0) && (c != 0xED || s[i + 1] < 0xA0);
    return good ? 3 : 0;
  }
  if (c >= 0xF0 && c <= 0xF4) {  // no overlong forms, nothing above U+10FFFF
    const bool good = follows(i + 1) && follows(i + 2) && follows(i + 3) && (c != 0xF0 || s[i + 1] >= 0x90) &&
                      (c != 0xF4 || s[i + 1] < 0x90);
    return good ? 4 : 0;
  }
  return 0;
}

/// Why the beginning of a file is no text, or "".
std::string why_not_text(const std::string& head) {
  if (head.starts_with("\xff\xfe") || head.starts_with("\xfe\xff"))
    return "is text in UTF-16, not UTF-8: convert it (iconv -f UTF-16 -t UTF-8)";
  if (const auto zero = head.find('\0'); zero != std::string::npos) {
    return detail::concat(
        "is binary (byte ", zero,
        " is 0), not text. Text may be packed with gzip or zstd; unpack other formats first");
  }
  std::size_t invalid = 0;
  for (std::size_t i = 0; i < head.size();) {
    const std::size_t length = character_at(head, i);
    invalid += length == 0 ? 1 : 0;
    i += std::max<std::size_t>(length, 1);
  }
  // Stray bytes are the tokenizer's concern; a short text has too few of them to tell.
  constexpr std::size_t kStray = 8;
  if (invalid <= kStray || 10 * invalid <= 3 * head.size()) return "";
  return detail::concat(
      "is binary or not in UTF-8 (", invalid, " of its first ", head.size(),
      " bytes are no part of a UTF-8 character). Text in another encoding: convert it with iconv");
}

bool begins_like_json(const std::string& head) {
  const auto at = head.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
  return at != std::string::npos && head[at] == '{' &&
         head.find_first_not_of(" \t", at + 1) == head.find('"', at + 1) &&
         head.find('"', at + 1) != std::string::npos;
}

std::string head_of(const std::string& path) {
  std::string head(std::size_t{1} << 16, '\0');
  head.resize(open_text(path)->read(head));
  return head;
}

/// What a shell would make of a pattern, in the order of names.
std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  const int code = ::glob(pattern.c_str(), GLOB_ERR | GLOB_TILDE, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  TESSERA_ENSURE(DataError, code == 0 || code == GLOB_NOMATCH, pattern,
                 ": its folders cannot be read. Check --input");
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// The first names, and how many there are.
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > kShown) text += detail::concat(", ... (", names.size(), " files)");
  return text;
}

class Lister {
 public:
  void add(const std::string& path) {
    std::error_code error;
    if (path.find_first_of("*?[") != std::string::npos && !fs::exists(path, error)) {
      const std::vector<std::string> found = matches(path);
      TESSERA_ENSURE(DataError, !found.empty(), path, ": nothing matches this pattern. Check --input");
      for (const std::string& each : found) add(each);
      return;
    }
    if (!fs::is_directory(path, error)) return add_file(path, false);
    const std::size_t before = out_.paths.size();
    add_folder(path);
    TESSERA_ENSURE(DataError, out_.paths.size() > before, path, ": the folder holds no files",
                   passed_over_.empty() ? "" : " of text; there is " + listed(passed_over_));
  }

  InputFiles take() {
    if (!passed_over_.empty()) out_.notes.push_back("passed over, being no text: " + listed(passed_over_));
    if (!like_json_.empty()) {
      out_.notes.push_back(
          "begins like JSON lines, but is read as one document of plain text because its name "
          "does not end in .jsonl, .json or .ndjson: " +
          listed(like_json_));
    }
    const auto json = std::count_if(out_.paths.begin(), out_.paths.end(), is_json_lines);
    const auto plain = static_cast<std::ptrdiff_t>(out_.paths.size()) - json;
    if (json > 0 && plain > 0) {
      out_.notes.push_back(detail::concat("the input is mixed: ", json, json == 1 ? " file" : " files",
                                          " of JSON lines, and ", plain,
                                          " of plain text, one document each"));
    }
    return std::move(out_);
  }

 private:
  void add_file(const std::string& path, bool in_folder) {
    if (in_folder && path.ends_with(".tessera.json")) {  // a dataset's record
      passed_over_.push_back(path);
      return;
    }
    if (!is_json_lines(path)) {
      const std::string head = head_of(path);
      const std::string reason = why_not_text(head);
      TESSERA_ENSURE(DataError, reason.empty() || in_folder, path, ": ", reason);
      if (!reason.empty()) {
        passed_over_.push_back(path);
        return;
      }
      if (begins_like_json(head)) like_json_.push_back(path);
    }
    out_.paths.push_back(path);
  }

  void add_folder(const fs::path& folder) {
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
        add_folder(entry);
      } else if (fs::is_regular_file(entry, error)) {
        add_file(entry.string(), true);
      }
    }
  }

  InputFiles out_;
  std::vector<std::string> passed_over_, like_json_;
};

}  // namespace

InputFiles list_inputs(std::span<const std::string> input) {
  Lister lister;
  for (const std::string& path : input) lister.add(path);
  return lister.take();
}

std::int64_t first_invalid_utf8(const std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = character_at(text, i);
    if (length == 0) return static_cast<std::int64_t>(i);
    i += length;
  }
  return -1;
}

}  // namespace tessera
