#include "checkpoint/file_io.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <vector>

namespace tessera::checkpoint_detail {
namespace fs = std::filesystem;

void bad_file(const fs::path& file, const std::string& where, const std::string& reason,
              const std::string& remedy) {
  std::string text =
      detail::concat(file.string(), ": ", where, where.empty() ? "" : ": ", reason, ". ", remedy);
  // Names out of damaged or hostile files: no control characters to a terminal, no NUL that cuts the message
  // short.
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 32 || c == 127; }, '?');
  throw CheckpointError(text);
}

void io_failed(const char* operation, const fs::path& path, int error, std::uint64_t needed_bytes) {
  std::string text =
      detail::concat("cannot ", operation, " ", path.string(), ": ", std::generic_category().message(error));
  if (needed_bytes > 0) {
    text += detail::concat(" (", needed_bytes, " bytes needed");
    if (const auto free = free_bytes(path.parent_path())) text += detail::concat(", ", *free, " free");
    text += ")";
  }
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      text += ". Free space on that file system, or choose another folder.";
      break;
    case EFBIG:
      text += ". The file size limit (ulimit -f) or the file system does not allow a file this large.";
      break;
    case EROFS:
    case EACCES:
    case EPERM:
      text += ". Choose a folder that you may write to, or change its permissions.";
      break;
    case EIO:
      text += ". The device reports an error: check it before you go on.";
      break;
    case EMFILE:
      text += ". Too many files are open: raise the limit (ulimit -n).";
      break;
    default:
      text += ".";
  }
  throw IoError(text);
}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void File::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

namespace {

bool is_inside(const fs::path& real, const fs::path& folder) {
  const auto [end, rest] = std::mismatch(folder.begin(), folder.end(), real.begin(), real.end());
  return end == folder.end() && rest != real.end();
}

/// models--NAME/snapshots/REVISION/[FOLDER/]FILE links to models--NAME/blobs/HASH.
bool is_cached_blob(const fs::path& real, const fs::path& folder) {
  for (const fs::path& revision : {folder, folder.parent_path()}) {
    const fs::path snapshots = revision.parent_path();
    if (snapshots.filename() == "snapshots" && real.parent_path() == snapshots.parent_path() / "blobs")
      return true;
  }
  return false;
}

/// Errors: CheckpointError for a link out of its folder.
void check_link(const fs::path& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return;
  const fs::path real = fs::canonical(path, error);
  if (error) return;  // no such file, which opening it will say
  const fs::path folder = fs::canonical(path.has_parent_path() ? path.parent_path() : ".", error);
  if (error || is_inside(real, folder) || is_cached_blob(real, folder)) return;
  bad_file(path, "", detail::concat("is a symbolic link to ", real.string(), ", outside of its folder"),
           "Put the file itself there; or, if you trust the folder, follow its links: --follow_symlinks of "
           "`tessera convert`, follow_symlinks=True in Python.");
}

}  // namespace

File open_for_reading(const fs::path& path, SymbolicLinks links) {
  if (links == SymbolicLinks::within_folder) check_link(path);
  // Non-blocking, so that a FIFO with a weight file's name cannot stop us before fstat sees what it is.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (links == SymbolicLinks::refuse ? O_NOFOLLOW : 0);
  File file(::open(path.c_str(), flags));
  if (!file.is_open()) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) bad_file(path, "", "there is no such file", "Check the path.");
    if (error == ELOOP)
      bad_file(path, "", "is a symbolic link",
               "Put the file itself into the folder; links are not followed here.");
    io_failed("open", path, error);
  }
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) io_failed("inspect", path, errno);
  if (!S_ISREG(info.st_mode)) bad_file(path, "", "is not a regular file", "Check the path.");
  return file;
}

File create_file(const fs::path& path) {
  File file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!file.is_open()) io_failed("create", path, errno);
  return file;
}

std::uint64_t size_of_file(const File& file, const fs::path& path) {
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) io_failed("inspect", path, errno);
  return static_cast<std::uint64_t>(info.st_size);
}

void read_exactly(const File& file, const fs::path& path, std::uint64_t offset, std::span<std::byte> out) {
  constexpr std::size_t kStep = std::size_t{1} << 30;  // Linux reads at most 2 GiB a call
  while (!out.empty()) {
    const ssize_t got =
        ::pread(file.fd(), out.data(), std::min(out.size(), kStep), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) io_failed("read", path, errno);
    if (got == 0)
      bad_file(path, detail::concat("byte ", offset), "the file ends before the data it promised",
               "It was cut short while in use; restore it.");
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

void write_exactly(const File& file, const fs::path& path, std::uint64_t offset,
                   std::span<const std::byte> bytes, std::uint64_t needed_bytes) {
  constexpr std::size_t kStep = std::size_t{1} << 26, kWorthTheDisk = std::size_t{1} << 20;
  const std::uint64_t first = offset;
  const std::size_t all = bytes.size();
  while (!bytes.empty()) {
    const ssize_t put =
        ::pwrite(file.fd(), bytes.data(), std::min(bytes.size(), kStep), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) io_failed("write", path, errno, needed_bytes);
    if (put == 0) io_failed("write", path, ENOSPC, needed_bytes);
    offset += static_cast<std::uint64_t>(put);
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
  // The disk may begin with what the system would hold back until the sync. No file system need take the
  // hint.
  if (all >= kWorthTheDisk)
    ::sync_file_range(file.fd(), static_cast<off_t>(first), static_cast<off_t>(all), SYNC_FILE_RANGE_WRITE);
}

void sync_file(const File& file, const fs::path& path) {
  if (::fsync(file.fd()) != 0) io_failed("sync", path, errno);
}

void sync_directory(const fs::path& dir) {
  const fs::path path = dir.empty() ? fs::path(".") : dir;
  File file(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!file.is_open()) io_failed("open", path, errno);
  // Some network file systems cannot sync a directory and say EINVAL; there is nothing better to do there.
  if (::fsync(file.fd()) != 0 && errno != EINVAL && errno != EROFS) io_failed("sync", path, errno);
}

void remove_tree(const fs::path& path) {
  // Somebody else may be removing the same: what is gone when its turn comes is no fault.
  constexpr int kMostRounds = 1000;
  std::error_code error;
  for (int round = 0; round < kMostRounds; ++round) {
    error.clear();
    fs::remove_all(path, error);
    if (error != std::errc::no_such_file_or_directory) break;
  }
  if (error) io_failed("remove", path, error.value());
}

void rename_path(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) io_failed("rename to", to, errno);
}

bool exchange(const fs::path& a, const fs::path& b) {
  const auto swap = [&] {
    return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
  };
  if (!swap()) return false;
  try {
    sync_directory(b.parent_path());
  } catch (const Error&) {
    swap();
    throw;
  }
  return true;
}

std::string read_text(const fs::path& path, std::uint64_t max_bytes, SymbolicLinks links) {
  const File file = open_for_reading(path, links);
  const std::uint64_t bytes = size_of_file(file, path);
  if (bytes > max_bytes)
    bad_file(path, "",
             detail::concat("has ", bytes, " bytes, more than the ", max_bytes, " such a file may have"),
             "Check that it is the right file.");
  std::string text(bytes, '\0');
  read_exactly(file, path, 0, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

void write_whole(const fs::path& path, const fs::path& staging, std::span<const std::byte> bytes) {
  try {
    const File file = create_file(staging);
    write_exactly(file, path, 0, bytes, bytes.size());
    sync_file(file, path);
    rename_path(staging, path);
  } catch (...) {
    std::error_code ignored;
    fs::remove(staging, ignored);
    throw;
  }
  sync_directory(path.parent_path());
}

void write_text(const fs::path& path, std::string_view text) {
  write_whole(path, incomplete_name(path), std::as_bytes(std::span(text.data(), text.size())));
}

void copy_file_synced(const fs::path& from, const fs::path& to, SymbolicLinks links) {
  const File source = open_for_reading(from, links);
  const std::uint64_t bytes = size_of_file(source, from);
  const File target = create_file(to);
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min<std::uint64_t>(bytes, 1 << 20)));
  for (std::uint64_t done = 0; done < bytes;) {
    const auto part = std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), bytes - done));
    read_exactly(source, from, done, part);
    write_exactly(target, to, done, part, bytes);
    done += part.size();
  }
  sync_file(target, to);
}

std::optional<std::uint64_t> free_bytes(const fs::path& dir) {
  struct statvfs info {};
  const fs::path path = dir.empty() ? fs::path(".") : dir;
  if (::statvfs(path.c_str(), &info) != 0 || info.f_blocks == 0) return std::nullopt;
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

void require_free_space(const fs::path& dir, std::uint64_t needed) {
  const auto free = free_bytes(dir);
  if (!free || *free >= needed) return;
  throw IoError(detail::concat("not enough space in ", dir.string(), ": ", needed, " bytes needed, ", *free,
                               " free. Free space on that file system, or choose another folder."));
}

void require_room_for(const fs::path& out, std::uint64_t needed) {
  std::error_code error;
  fs::path folder = fs::absolute(out, error);
  while (!fs::is_directory(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
  require_free_space(folder, needed);
}

bool is_plain_file_name(std::string_view name) {
  if (name.empty() || name.size() > 255 || name.front() == '.') return false;
  return std::none_of(name.begin(), name.end(),
                      [](char c) { return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 32; });
}

fs::path incomplete_name(const fs::path& path) {
  return path.parent_path() / (".incomplete-" + path.filename().string());
}

fs::path marked_name(const fs::path& name, std::uint32_t mark) {
  std::array<char, 10> text{};
  std::snprintf(text.data(), text.size(), "~%08x", static_cast<unsigned>(mark));
  return name.string() + text.data();
}

fs::path without_mark(const fs::path& name) {
  constexpr std::size_t kMark = 9;
  std::string text = name.string();
  const std::size_t at = text.size() - std::min(kMark, text.size());
  const bool marked = text.find('~', at) == at &&
                      text.find_first_not_of("0123456789abcdef", at + 1) == std::string::npos &&
                      text.size() - at == kMark;
  if (marked) text.resize(at);
  return text;
}

fs::path replaced_name(const fs::path& path) {
  return path.parent_path() / (".incomplete-" + path.filename().string() + "-replaced");
}

void require_unused(const fs::path& out) {
  std::error_code error;
  const auto status = fs::symlink_status(out, error);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status) || !fs::is_empty(out, error))
    bad_file(out, "", "already exists",
             "Name a new folder, or remove this one first; nothing is overwritten.");
}

}  // namespace tessera::checkpoint_detail
