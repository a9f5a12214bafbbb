#include "data/text_source.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <vector>

#include "data/file.hpp"

extern char** environ;  // NOLINT: handed on to the child unread

namespace tessera {
namespace {

class PlainText final : public TextSource {
 public:
  explicit PlainText(const std::string& path) : file_(path, files::Keep::nothing) {}
  std::size_t read(std::span<char> out) override {
    const auto left = static_cast<std::size_t>(file_.size() - offset_);
    const auto part = out.first(std::min(left, out.size()));
    file_.read(offset_, std::as_writable_bytes(part));
    offset_ += static_cast<std::int64_t>(part.size());
    return part.size();
  }
  std::int64_t consumed() const override { return offset_; }
  std::int64_t size() const { return file_.size(); }

 private:
  files::InputFile file_;
  std::int64_t offset_ = 0;
};

/// One gzip member after the other, as `gzip -d` unpacks them.
class GzipText final : public TextSource {
 public:
  explicit GzipText(const std::string& path) : packed_(path), path_(path), buffer_(std::size_t{1} << 18) {
    constexpr int kGzipOnly = 15 + 16;
    TESSERA_ENSURE(IoError, inflateInit2(&stream_, kGzipOnly) == Z_OK, path, ": zlib cannot begin");
  }
  ~GzipText() override { inflateEnd(&stream_); }
  GzipText(const GzipText&) = delete;
  GzipText& operator=(const GzipText&) = delete;

  std::size_t read(std::span<char> out) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(out.size());
    while (stream_.avail_out > 0 && fill()) {
      if (between_members_) inflateReset(&stream_);
      const int code = inflate(&stream_, Z_NO_FLUSH);
      TESSERA_ENSURE(DataError, code == Z_OK || code == Z_STREAM_END || code == Z_BUF_ERROR, path_,
                     ": is damaged: gzip data before byte ", consumed(), ": ",
                     stream_.msg != nullptr ? stream_.msg : "unreadable");
      between_members_ = code == Z_STREAM_END;
    }
    TESSERA_ENSURE(DataError, stream_.avail_out == 0 || between_members_, path_,
                   ": its gzip data are cut off. Copy the file again");
    return out.size() - stream_.avail_out;
  }
  std::int64_t consumed() const override { return packed_.consumed(); }
  std::int64_t packed_bytes() const override { return packed_.size(); }

 private:
  /// Whether there is packed input.
  bool fill() {
    if (stream_.avail_in == 0) {
      stream_.avail_in = static_cast<uInt>(packed_.read(buffer_));
      stream_.next_in = reinterpret_cast<Bytef*>(buffer_.data());
    }
    return stream_.avail_in > 0;
  }

  PlainText packed_;
  std::string path_;
  std::vector<char> buffer_;
  z_stream stream_{};
  bool between_members_ = false;
};

/// What the program `zstd` unpacks.
class ZstdText final : public TextSource {
 public:
  explicit ZstdText(const std::string& path)
      : path_(path), bytes_(files::InputFile(path, files::Keep::nothing).size()) {
    int ends[2] = {-1, -1};
    TESSERA_ENSURE(IoError, ::pipe2(ends, O_CLOEXEC) == 0, "pipe: ", files::reason(errno));
    messages_ = ::memfd_create("zstd-stderr", MFD_CLOEXEC);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    if (messages_ >= 0) ::posix_spawn_file_actions_adddup2(&actions, messages_, STDERR_FILENO);
    std::string words[] = {"zstd", "-dcq", "--", path};
    char* const arguments[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
    const int error = ::posix_spawnp(&child_, "zstd", &actions, nullptr, arguments, environ);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    pipe_ = ends[0];
    if (error == 0) return;
    close_all();
    throw ConfigError(detail::concat(
        path, ": is packed with Zstandard, and the program zstd that unpacks it ",
        "cannot be started: ", files::reason(error), ". Install it (apt install zstd), or unpack the file"));
  }
  ~ZstdText() override {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
    close_all();
  }
  ZstdText(const ZstdText&) = delete;
  ZstdText& operator=(const ZstdText&) = delete;

  std::size_t read(std::span<char> out) override {
    std::size_t done = 0;
    while (child_ > 0 && done < out.size()) {
      const auto got = ::read(pipe_, out.data() + done, out.size() - done);
      if (got < 0 && errno == EINTR) continue;
      TESSERA_ENSURE(IoError, got >= 0, path_, ": reading from zstd failed: ", files::reason(errno));
      if (got == 0) finish();
      done += static_cast<std::size_t>(got);
    }
    return done;
  }
  std::int64_t consumed() const override { return child_ > 0 ? 0 : bytes_; }
  std::int64_t packed_bytes() const override { return bytes_; }

 private:
  void finish() {
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    child_ = -1;
    char said[500];
    const auto size = messages_ < 0 ? 0 : ::pread(messages_, said, sizeof said, 0);
    const std::string text(said, static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
    TESSERA_ENSURE(DataError, WIFEXITED(status) && WEXITSTATUS(status) == 0, path_,
                   ": zstd cannot unpack it: ", text, "Copy the file again");
  }
  void close_all() {
    ::close(pipe_);
    if (messages_ >= 0) ::close(messages_);
  }

  std::string path_;
  std::int64_t bytes_;
  pid_t child_ = -1;
  int pipe_ = -1;
  int messages_ = -1;
};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; });
  return text;
}

}  // namespace

std::unique_ptr<TextSource> open_text(const std::string& path) {
  std::string head(4, '\0');
  head.resize(PlainText(path).read(head));
  if (head.starts_with("\x1f\x8b")) return std::make_unique<GzipText>(path);
  if (head == "\x28\xb5\x2f\xfd") return std::make_unique<ZstdText>(path);
  return std::make_unique<PlainText>(path);
}

std::string text_extension(const std::string& path) {
  const std::filesystem::path name = lower(std::filesystem::path(path).filename().string());
  const std::filesystem::path outer = name.extension();
  return (outer == ".gz" || outer == ".zst" ? name.stem().extension() : outer).string();
}

}  // namespace tessera
