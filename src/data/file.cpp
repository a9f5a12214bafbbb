#include "data/file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

namespace tessera::files {

static_assert(std::endian::native == std::endian::little, "the file formats are little-endian");

std::string reason(int code) { return std::generic_category().message(code); }

namespace {

using Kept = std::unique_ptr<std::byte, void (*)(void*)>;

/// Null for none. What is large is read at random: with large pages it takes a miss less each time.
Kept room_for(std::int64_t bytes) {
  constexpr std::size_t kLargePage = std::size_t{2} << 20;
  const auto size = static_cast<std::size_t>(bytes);
  if (size == 0) return {nullptr, std::free};
  const bool large = size >= kLargePage;
  const std::size_t rounded = (size + kLargePage - 1) / kLargePage * kLargePage;
  Kept room(static_cast<std::byte*>(large ? std::aligned_alloc(kLargePage, rounded) : std::malloc(size)),
            std::free);
  if (room == nullptr) throw std::bad_alloc();
  if (large) ::madvise(room.get(), rounded, MADV_HUGEPAGE);  // where the system has none, nothing changes
  return room;
}

}  // namespace

InputFile::InputFile(const std::string& path, Keep keep, const std::string& remedy)
    : path_(path), kept_(nullptr, std::free) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  const int error = errno;
  TESSERA_ENSURE(DataError, fd_ >= 0, path, ": cannot be opened: ", reason(error), ". ", remedy);
  try {
    struct stat info {};
    const bool regular = ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode);
    TESSERA_ENSURE(DataError, regular, path, ": is not a regular file. ", remedy);
    size_ = info.st_size;
    if (keep == Keep::nothing || (keep == Keep::small && size_ > kKeptBytes)) return;
    Kept bytes = [&] {
      try {
        return room_for(size_);
      } catch (const std::bad_alloc&) {
        throw IoError(detail::concat(path, ": its ", size_, " bytes do not fit into memory"));
      }
    }();
    read_from_disk(0, {bytes.get(), static_cast<std::size_t>(size_)});
    kept_ = std::move(bytes);
  } catch (...) {
    ::close(fd_);
    throw;
  }
  ::close(std::exchange(fd_, -1));
}

InputFile::InputFile(std::string path, std::span<const std::byte> bytes)
    : path_(std::move(path)),
      size_(static_cast<std::int64_t>(bytes.size())),
      kept_(room_for(static_cast<std::int64_t>(bytes.size()))) {
  if (!bytes.empty()) std::memcpy(kept_.get(), bytes.data(), bytes.size());
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void InputFile::read(std::int64_t offset, std::span<std::byte> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  TESSERA_ENSURE(DataError, offset >= 0 && count <= size_ && offset <= size_ - count, path_, ": bytes ",
                 offset, " to ", offset + count, " lie beyond its end at ", size_);
  if (count == 0) return;
  if (kept_ != nullptr) {
    std::memcpy(out.data(), kept_.get() + offset, out.size());
  } else {
    read_from_disk(offset, out);
  }
}

void InputFile::read_from_disk(std::int64_t offset, std::span<std::byte> out) const {
  for (std::size_t done = 0; done < out.size();) {
    const auto got =
        ::pread(fd_, out.data() + done, out.size() - done, offset + static_cast<std::int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    TESSERA_ENSURE(IoError, got >= 0, path_, ": reading at byte ", offset, " failed: ", reason(errno));
    TESSERA_ENSURE(DataError, got > 0, path_, ": ended at byte ", offset + static_cast<std::int64_t>(done),
                   " while it was in use; it had ", size_,
                   " bytes when opened. Write data under a new name "
                   "while a run reads the old one");
    done += static_cast<std::size_t>(got);
  }
}

void InputFile::check_unchanged() const {
  if (fd_ < 0) return;
  struct stat info {};
  TESSERA_ENSURE(IoError, ::fstat(fd_, &info) == 0, path_, ": ", reason(errno));
  TESSERA_ENSURE(DataError, info.st_size == size_, path_, ": changed from ", size_, " to ", info.st_size,
                 " bytes while it was in use. Write data under a new name while a run reads the old one");
}

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  for (int attempt = 0; fd_ < 0; ++attempt) {
    temporary_ = detail::concat(path_, ".tmp-", ::getpid(), "-", attempt);
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    TESSERA_ENSURE(IoError, fd_ >= 0 || (errno == EEXIST && attempt < 1000), temporary_,
                   ": cannot be created: ", reason(errno),
                   ". Choose an output folder that exists and can be written");
  }
  buffer_.reserve(std::size_t{1} << 20);
}

OutputFile::OutputFile(std::string path, std::string temporary, std::int64_t size)
    : path_(std::move(path)), temporary_(std::move(temporary)), written_(size) {
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  TESSERA_ENSURE(IoError, fd_ >= 0, temporary_, ": cannot be created: ", reason(errno),
                 ". Choose an output folder that exists and can be written");
  kept_ = true;
  struct stat info {};
  const bool long_enough = ::fstat(fd_, &info) == 0 && info.st_size >= size;
  const bool cut = long_enough && ::ftruncate(fd_, size) == 0 && ::lseek(fd_, size, SEEK_SET) == size;
  const int error = errno;
  if (!cut) ::close(std::exchange(fd_, -1));
  TESSERA_ENSURE(DataError, long_enough, temporary_, ": has ", info.st_size, " bytes, not ", size);
  TESSERA_ENSURE(IoError, cut, temporary_, ": cannot be cut off at byte ", size, ": ", reason(error));
  buffer_.reserve(std::size_t{1} << 20);
}

OutputFile::~OutputFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (!kept_) ::unlink(temporary_.c_str());
}

void OutputFile::write(std::span<const std::byte> bytes) {
  written_ += static_cast<std::int64_t>(bytes.size());
  while (!bytes.empty()) {
    const std::size_t room = buffer_.capacity() - buffer_.size();
    const auto part = bytes.first(std::min(room, bytes.size()));
    buffer_.insert(buffer_.end(), part.begin(), part.end());
    bytes = bytes.subspan(part.size());
    if (buffer_.size() == buffer_.capacity()) flush();
  }
}

void OutputFile::flush() {
  for (std::size_t done = 0; done < buffer_.size();) {
    const auto put = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (put < 0 && errno == EINTR) continue;
    TESSERA_ENSURE(IoError, put > 0, temporary_, ": writing failed after ", written_,
                   " bytes: ", reason(errno), ". ", path_, " is unchanged");
    done += static_cast<std::size_t>(put);
  }
  buffer_.clear();
}

void OutputFile::sync() {
  flush();
  TESSERA_ENSURE(IoError, ::fsync(fd_) == 0, temporary_, ": cannot be synced to the disk: ", reason(errno));
}

void OutputFile::publish(bool durable) {
  flush();
  if (durable) sync();
  TESSERA_ENSURE(IoError, ::rename(temporary_.c_str(), path_.c_str()) == 0, temporary_,
                 ": cannot be renamed to ", path_, ": ", reason(errno));
  ::close(fd_);
  fd_ = -1;
  if (!durable) return;
  const auto folder = std::filesystem::path(path_).parent_path();
  const int folder_fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0)
    return;  // a folder one may write but not read: the rename stands, only its sync is left out
  ::fsync(folder_fd);
  ::close(folder_fd);
}

std::string hex(std::uint64_t value) {
  std::string text(16, '0');
  for (int i = 15; i >= 0; --i, value >>= 4)
    text[static_cast<std::size_t>(i)] = "0123456789abcdef"[value & 15];
  return text;
}

}  // namespace tessera::files
