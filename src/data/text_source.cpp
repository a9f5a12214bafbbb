#include "data/text_source.hpp"

#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/python_module.hpp"
#include "data/file.hpp"
#include "data/worker_process.hpp"

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
  void skip(std::int64_t count) override {
    TESSERA_ENSURE(DataError, count <= file_.size() - offset_, file_.path(), ": is shorter than it was");
    offset_ += count;
  }
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

/// One Zstandard frame after the other, as `zstd -d` unpacks them.
class ZstdText final : public TextSource {
 public:
  explicit ZstdText(const std::string& path)
      : packed_(path), path_(path), buffer_(ZSTD_DStreamInSize()), stream_(ZSTD_createDStream()) {
    TESSERA_ENSURE(IoError, stream_ != nullptr, path, ": zstd cannot begin");
  }
  ~ZstdText() override { ZSTD_freeDStream(stream_); }
  ZstdText(const ZstdText&) = delete;
  ZstdText& operator=(const ZstdText&) = delete;

  std::size_t read(std::span<char> out) override {
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    // What is in the stream's own buffer comes without more input.
    while (to.pos < to.size && (fill() || pending_)) {
      const std::size_t code = ZSTD_decompressStream(stream_, &to, &in_);
      TESSERA_ENSURE(DataError, ZSTD_getErrorCode(code) != ZSTD_error_frameParameter_windowTooLarge, path_,
                     ": was packed with a window above 128 MiB. Unpack it (zstd -d --long=31), and give the "
                     "unpacked file");
      TESSERA_ENSURE(DataError, ZSTD_isError(code) == 0, path_, ": is damaged: Zstandard data before byte ",
                     consumed(), ": ", ZSTD_getErrorName(code), ". Copy the file again");
      between_frames_ = code == 0;
      pending_ = !between_frames_ && to.pos == to.size;
    }
    TESSERA_ENSURE(DataError, to.pos == to.size || between_frames_, path_,
                   ": its Zstandard data are cut off. Copy the file again");
    return to.pos;
  }
  std::int64_t consumed() const override { return packed_.consumed(); }
  std::int64_t packed_bytes() const override { return packed_.size(); }

 private:
  /// Whether there is packed input.
  bool fill() {
    if (in_.pos == in_.size) in_ = {buffer_.data(), packed_.read(buffer_), 0};
    return in_.pos < in_.size;
  }

  PlainText packed_;
  std::string path_;
  std::vector<char> buffer_;
  ZSTD_DStream* stream_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  bool between_frames_ = true;
  bool pending_ = false;  ///< the stream may hold more than there was room for
};

/// The rows of a Parquet file as JSON lines, by a Python process: `pyarrow` reads them.
class ParquetText final : public TextSource {
 public:
  ParquetText(const std::string& path, const TextOptions& options)
      : path_(path),
        bytes_(files::InputFile(path, files::Keep::nothing).size()),
        worker_(command_of(path, options), options.timeout_s, kParquetRemedy) {
    try {
      rows_ = parquet_number(answer());
    } catch (const IoError& error) {
      throw ConfigError(error.what());
    }
  }

  std::size_t read(std::span<char> out) override {
    std::size_t done = 0;
    while (done < out.size() && !at_end_) {
      if (used_ == lines_.size()) {
        fetch();
        continue;
      }
      const std::size_t count = std::min(out.size() - done, lines_.size() - used_);
      std::memcpy(out.data() + done, lines_.data() + used_, count);
      used_ += count;
      done += count;
    }
    return done;
  }
  std::int64_t consumed() const override {
    return at_end_ || rows_ == 0 ? bytes_
                                 : static_cast<std::int64_t>(static_cast<double>(bytes_) *
                                                             static_cast<double>(std::min(row_, rows_)) /
                                                             static_cast<double>(rows_));
  }
  std::int64_t packed_bytes() const override { return bytes_; }

 private:
  static constexpr const char* kParquetRemedy =
      "Reading Parquet needs Python 3 with two packages: pip install tessera pyarrow";
  // The worker's frames. rows: u64, unasked, then after each request u64 rows so far and their lines.
  static constexpr std::uint32_t kRows = 1;
  static constexpr std::uint32_t kRefused = 4;  ///< UTF-8 message: the file cannot be used
  static constexpr std::uint32_t kMissing = 5;  ///< UTF-8 message: a Python package is missing

  static std::vector<std::string> command_of(const std::string& path, const TextOptions& options) {
    std::vector<std::string> command = python_module(options.python, "tessera.parquet_worker");
    command.push_back(path);
    command.insert(command.end(), options.keys.begin(), options.keys.end());
    return command;
  }
  std::vector<std::byte> answer() {
    Frame frame = worker_.receive();
    const std::string text(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
    if (frame.kind == kMissing) throw ConfigError(path_ + ": is Parquet. " + text);
    if (frame.kind == kRefused) throw DataError(path_ + ": " + text);
    TESSERA_ENSURE(DataError, frame.kind == kRows, path_, ": the reader of Parquet answered ", frame.kind,
                   ". ", kParquetRemedy);
    return std::move(frame.payload);
  }
  void fetch() {
    worker_.send(kRows, {});
    lines_ = answer();
    row_ = parquet_number(lines_);
    used_ = sizeof(std::uint64_t);
    at_end_ = used_ == lines_.size();
  }
  std::int64_t parquet_number(std::span<const std::byte> payload) const {
    std::uint64_t value = 0;
    TESSERA_ENSURE(DataError, payload.size() >= sizeof value, path_,
                   ": the answer of the reader of Parquet is cut off");
    std::memcpy(&value, payload.data(), sizeof value);
    return static_cast<std::int64_t>(std::min<std::uint64_t>(value, INT64_MAX));
  }

  std::string path_;
  std::int64_t bytes_;
  WorkerProcess worker_;
  std::int64_t rows_ = 0;
  std::int64_t row_ = 0;
  std::vector<std::byte> lines_;
  std::size_t used_ = 0;
  bool at_end_ = false;
};

constexpr const char* kParquetMagic = "PAR1";

std::string head_of(const std::string& path) {
  std::string head(4, '\0');
  head.resize(PlainText(path).read(head));
  return head;
}

/// A frame of data, or one to pass over, which packers that work in parallel write first.
bool is_zstd(const std::string& head) {
  return head == "\x28\xb5\x2f\xfd" ||
         (head.size() == 4 && (head[0] & 0xF0) == 0x50 && head.substr(1) == "\x2a\x4d\x18");
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; });
  return text;
}

}  // namespace

void TextSource::skip(std::int64_t count) {
  std::vector<char> piece(std::size_t{1} << 20);
  while (count > 0) {
    const auto part = std::span(piece).first(
        static_cast<std::size_t>(std::min(count, static_cast<std::int64_t>(piece.size()))));
    const std::size_t got = read(part);
    TESSERA_ENSURE(DataError, got > 0, "the input is shorter than it was");
    count -= static_cast<std::int64_t>(got);
  }
}

std::unique_ptr<TextSource> open_text(const std::string& path, const TextOptions& options) {
  const std::string head = head_of(path);
  if (head.starts_with("\x1f\x8b")) return std::make_unique<GzipText>(path);
  if (is_zstd(head)) return std::make_unique<ZstdText>(path);
  if (head == kParquetMagic) return std::make_unique<ParquetText>(path, options);
  return std::make_unique<PlainText>(path);
}

bool is_parquet(const std::string& path) { return head_of(path) == kParquetMagic; }

std::string text_extension(const std::string& path) {
  const std::filesystem::path name = lower(std::filesystem::path(path).filename().string());
  const std::filesystem::path outer = name.extension();
  return (outer == ".gz" || outer == ".zst" ? name.stem().extension() : outer).string();
}

}  // namespace tessera
