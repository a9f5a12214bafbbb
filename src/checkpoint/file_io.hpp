#pragma once
/// Files and directories as a checkpoint needs them: exact reads and writes, durable renames, errors with
/// numbers.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/checkpoint/safetensors.hpp"

namespace tessera::checkpoint_detail {

/// Throws CheckpointError: "FILE: WHERE: REASON. REMEDY".
[[noreturn]] void bad_file(const std::filesystem::path& file, const std::string& where,
                           const std::string& reason, const std::string& remedy);

/// Throws IoError for a failed system call, with the bytes needed and free where space may be the cause.
[[noreturn]] void io_failed(const char* operation, const std::filesystem::path& path, int error,
                            std::uint64_t needed_bytes = 0);

/// An open file descriptor.
class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  ~File() { close(); }
  File(File&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  File& operator=(File&& other) noexcept;
  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

/// Opens a regular file for reading. A missing file or one of another kind is a CheckpointError.
File open_for_reading(const std::filesystem::path& path, SymbolicLinks links);
/// Creates or truncates a file, never through a link.
File create_file(const std::filesystem::path& path);
std::uint64_t size_of_file(const File& file, const std::filesystem::path& path);
/// Reads exactly out.size() bytes. A file that ends earlier is a CheckpointError.
void read_exactly(const File& file, const std::filesystem::path& path, std::uint64_t offset,
                  std::span<std::byte> out);
void write_exactly(const File& file, const std::filesystem::path& path, std::uint64_t offset,
                   std::span<const std::byte> bytes, std::uint64_t needed_bytes);
void sync_file(const File& file, const std::filesystem::path& path);
void sync_directory(const std::filesystem::path& dir);
/// Removes a folder and what is below it, never what links in it lead to.
void remove_tree(const std::filesystem::path& path);
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);
/// Exchanges two folders of one parent atomically, and syncs the parent. False with errno: it did not happen.
/// Errors: IoError where the sync fails; then they are exchanged back.
bool exchange(const std::filesystem::path& a, const std::filesystem::path& b);

/// Reads a text file of at most max_bytes.
std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes, SymbolicLinks links);
/// Writes a file under the name `staging`, syncs it, renames it into place and syncs its folder.
void write_whole(const std::filesystem::path& path, const std::filesystem::path& staging,
                 std::span<const std::byte> bytes);
/// The same under a temporary name of its own.
void write_text(const std::filesystem::path& path, std::string_view text);
/// Copies a regular file, synced.
void copy_file_synced(const std::filesystem::path& from, const std::filesystem::path& to,
                      SymbolicLinks links = SymbolicLinks::refuse);

/// Free bytes for us on the file system of `dir`, or nothing if it does not say.
std::optional<std::uint64_t> free_bytes(const std::filesystem::path& dir);
/// Throws IoError unless `needed` bytes fit on the file system of `dir`.
void require_free_space(const std::filesystem::path& dir, std::uint64_t needed);
/// The same for a folder `out` that is to be made.
void require_room_for(const std::filesystem::path& out, std::uint64_t needed);

/// Throws CheckpointError if there is anything in `out`, the folder that something new is to be.
void require_unused(const std::filesystem::path& out);

/// True for a name that can only mean a file of the same folder.
bool is_plain_file_name(std::string_view name);

/// The temporary sibling a file or folder has until it is complete.
std::filesystem::path incomplete_name(const std::filesystem::path& path);

/// That name with a writer's mark, so that no two write under one name: `NAME~0123abcd`.
std::filesystem::path marked_name(const std::filesystem::path& name, std::uint32_t mark);
/// The name without a mark, if it has one.
std::filesystem::path without_mark(const std::filesystem::path& name);

/// The one under which a folder is set aside while another takes its place.
std::filesystem::path replaced_name(const std::filesystem::path& path);

}  // namespace tessera::checkpoint_detail
