#include "tessera/checkpoint/staged_directory.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <random>
#include <vector>

#include "checkpoint/file_io.hpp"
#include "checkpoint/model_update.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera {
namespace fs = std::filesystem;
using namespace checkpoint_detail;

namespace {

constexpr int kAttempts = 3;

bool is_there(const fs::path& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

/// The folder itself, where a link stands for it; without a separator at the end.
fs::path resolved(fs::path target) {
  if (!target.has_filename()) target = target.parent_path();
  std::error_code error;
  if (!fs::is_symlink(target, error) && target.filename() != "." && target.filename() != "..") return target;
  const fs::path real = fs::canonical(target, error);
  return error ? target : real;
}

/// Of save_state(), whose folders had other names while they were written, up to version 0.1.
bool is_earlier_state(const fs::path& target) { return target.filename() == "tessera_state"; }
fs::path earlier_name(const fs::path& target, const char* end) {
  return target.parent_path() / detail::concat(".", target.filename().string(), end);
}

/// Gives the folder set aside its name back, if nothing has it. Whoever publishes sees that and begins anew.
void give_back(const fs::path& aside, const fs::path& target) {
  if (is_there(target) || !is_there(aside)) return;
  if (::rename(aside.c_str(), target.c_str()) != 0 && errno != ENOENT && errno != EEXIST &&
      errno != ENOTEMPTY)
    io_failed("rename to", target, errno);
  sync_directory(target.parent_path());
}

/// Syncs the folder. Where that fails nobody knows what a crash would leave: `undo` first.
template <typename Undo>
void sync_or(const fs::path& dir, Undo undo) {
  try {
    sync_directory(dir);
  } catch (const Error&) {
    undo();
    throw;
  }
}

void check_safetensors(const fs::path& dir) {
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") SafetensorsReader(it->path(), SymbolicLinks::refuse);
  }
  if (error) io_failed("list", dir, error.value());
}

void sync_tree(const fs::path& dir) {
  std::error_code error;
  for (fs::recursive_directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const auto status = it->symlink_status(error);
    if (error) break;
    if (fs::is_regular_file(status))
      sync_file(open_for_reading(it->path(), SymbolicLinks::refuse), it->path());
    if (fs::is_directory(status)) sync_directory(it->path());
  }
  if (error) io_failed("list", dir, error.value());
  sync_directory(dir);
}

/// A folder that is locked until `lock` is closed, which the system does for a process that dies: whoever
/// finds it knows whether it is still written.
struct Staging {
  fs::path path;
  int lock = -1;  // where the file system has no locks
};

enum class Lock { taken, held_by_another, none };

Lock lock_folder(const fs::path& folder, File& file) {
  file = File(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!file.is_open()) return errno == ENOENT ? Lock::held_by_another : Lock::none;
  if (::flock(file.fd(), LOCK_EX | LOCK_NB) == 0) return Lock::taken;
  return errno == EWOULDBLOCK ? Lock::held_by_another : Lock::none;
}

/// A new folder of that name and a mark of its own.
Staging make_staging(const fs::path& name) {
  std::random_device random;
  for (int attempt = 0;; ++attempt) {
    const fs::path path = marked_name(name, random());
    if (::mkdir(path.c_str(), 0755) != 0) {
      if (errno != EEXIST || attempt == kAttempts) io_failed("create", path, errno);
      continue;
    }
    File file;
    const Lock lock = lock_folder(path, file);
    // Whoever has seen it before it was locked may be removing it as a leftover.
    if (lock == Lock::held_by_another || !is_there(path)) continue;
    return {path, lock == Lock::taken ? ::dup(file.fd()) : -1};
  }
}

/// Removes folders of that name, whatever their mark, that nobody writes.
void remove_abandoned(const fs::path& name) {
  const fs::path parent = name.parent_path().empty() ? fs::path(".") : name.parent_path();
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    const fs::path path = name.parent_path() / it->path().filename();
    if (without_mark(path) == name) found.push_back(path);
  }
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory)
    io_failed("list", parent, error.value());
  for (const fs::path& path : found) {
    File held_meanwhile;
    if (lock_folder(path, held_meanwhile) != Lock::held_by_another) remove_tree(path);
  }
}

}  // namespace

StagedDirectory::StagedDirectory(fs::path target, Existing existing)
    : target_(resolved(std::move(target))), existing_(existing) {
  const fs::path parent = target_.parent_path();
  std::error_code error;
  if (!parent.empty()) fs::create_directories(parent, error);
  if (error) io_failed("create", parent, error.value());
  recover_directory(target_);
  inside_ = existing_ == Existing::update && fs::is_directory(target_) && !is_exchangeable(target_);
  const Staging made = make_staging(inside_ ? target_ / kStagedUpdate : incomplete_name(target_));
  staging_ = made.path;
  lock_ = made.lock;
}

StagedDirectory::~StagedDirectory() {
  std::error_code ignored;
  if (!staging_.empty()) fs::remove_all(staging_, ignored);
  unlock();
}

void StagedDirectory::unlock() {
  if (lock_ >= 0) ::close(lock_);
  lock_ = -1;
}

void StagedDirectory::sync() const { sync_tree(staging_); }

void StagedDirectory::publish() {
  TESSERA_CHECK(!staging_.empty(), target_.string(), " is published already");
  if (existing_ == Existing::update) check_safetensors(staging_);
  sync_directory(staging_);
  if (inside_) {
    unlock();  // whoever carries the update out locks this very folder
    update_in_place(staging_, target_);
    staging_.clear();
    return;
  }
  if (::rename(staging_.c_str(), target_.c_str()) == 0) {  // where there is none, or an empty one
    sync_or(target_.parent_path(), [&] { ::rename(target_.c_str(), staging_.c_str()); });
    staging_.clear();
  } else if (errno != EEXIST && errno != ENOTEMPTY) {
    io_failed("rename to", target_, errno);
  } else if (existing_ == Existing::refuse) {
    io_failed("rename to", target_, EEXIST);
  } else {
    existing_ == Existing::replace ? replace() : update();
  }
}

void StagedDirectory::replace() {
  const fs::path aside = replaced_name(target_);
  int error = 0;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (exchange(staging_, target_)) return;
    if (errno != EINVAL && errno != ENOSYS) io_failed("rename to", target_, errno);
    // No atomic exchange on this file system: the old one steps aside, the new one comes in. Between the two
    // whoever looks for the folder gives the old one its name back, and the new one tries again.
    if (::rename(target_.c_str(), aside.c_str()) != 0) {
      error = errno;
      break;
    }
    sync_directory(target_.parent_path());
    if (::rename(staging_.c_str(), target_.c_str()) == 0) {
      sync_or(target_.parent_path(), [&] {
        ::rename(target_.c_str(), staging_.c_str());
        ::rename(aside.c_str(), target_.c_str());
      });
      staging_ = aside;
      return;
    }
    error = errno;
    give_back(aside, target_);
    if (error != EEXIST && error != ENOTEMPTY) break;
  }
  io_failed("rename to", target_, error);
}

void StagedDirectory::update() {
  if (is_exchangeable(target_) && exchange_model(staging_, target_)) return;
  unlock();
  update_in_place(staging_, target_);
  staging_.clear();
}

void settle_directory(const fs::path& given) {
  const fs::path target = resolved(given);
  give_back(replaced_name(target), target);
  if (is_earlier_state(target)) give_back(earlier_name(target, ".old"), target);
  finish_update(target);
}

void recover_directory(const fs::path& given) {
  const fs::path target = resolved(given);
  settle_directory(target);
  remove_abandoned(incomplete_name(target));
  remove_abandoned(target / kStagedUpdate);
  std::vector<fs::path> leftovers = {replaced_name(target)};
  if (is_earlier_state(target)) {
    for (const char* end : {".old", ".incomplete"}) leftovers.push_back(earlier_name(target, end));
  }
  for (const fs::path& left : leftovers) {
    if (is_there(left)) remove_tree(left);
  }
}

void remove_directory(const fs::path& dir) {
  // Out of sight first, so that a crash half way leaves a leftover and not a damaged folder.
  const fs::path hidden = incomplete_name(dir);
  if (is_there(hidden)) remove_tree(hidden);
  rename_path(dir, hidden);
  sync_directory(dir.parent_path());
  remove_tree(hidden);
}

void publish_file(const fs::path& path, std::span<const std::byte> bytes) {
  // Processes that write the same file do not write it under the same name.
  write_whole(path, detail::concat(incomplete_name(path).string(), "-", ::getpid()), bytes);
}

}  // namespace tessera
