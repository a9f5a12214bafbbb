#include "checkpoint/model_update.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <thread>

#include "checkpoint/file_io.hpp"
#include "checkpoint/json_strict.hpp"
#include "checkpoint/tessera_folder.hpp"

namespace tessera::checkpoint_detail {
namespace fs = std::filesystem;
namespace {

constexpr const char* kFiles = "files.json";  // names of the update's files, written before it is decided
constexpr std::uint64_t kMaxFilesBytes = 100'000'000;

/// Without one of these a folder holds no model for anybody.
bool is_description(const std::string& name) { return name == "config.json" || name == "tessera.json"; }

std::vector<std::string> names_in(const fs::path& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  if (error) io_failed("list", dir, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

void remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) io_failed("remove", path, errno);
}

/// Moves a file that may have been moved already, by whoever was here before or is here as well.
void move_file(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) io_failed("rename to", to, errno);
}

std::vector<std::string> decided_files(const fs::path& ready) {
  const Json document = read_json(ready / kFiles, kMaxFilesBytes, SymbolicLinks::refuse);
  const JsonView list(document, (ready / kFiles).string());
  std::vector<std::string> names;
  for (std::size_t i = 0; i < list.size(); ++i) {
    names.push_back(list[i].text());
    if (!is_plain_file_name(names.back())) list[i].fail("is not the plain name of a file");
  }
  return names;
}

/// Others who finish the same update wait, for as long as some renames take.
void wait_for_turn(const File& folder, const fs::path& path) {
  constexpr auto kStep = std::chrono::milliseconds(10);
  for (auto waited = kStep; ::flock(folder.fd(), LOCK_EX | LOCK_NB) != 0; waited += kStep) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return;  // no locks on this file system
    if (waited > std::chrono::seconds(10))
      throw IoError(
          detail::concat(path.string(),
                         ": another process has been putting new files of the model in place for 10 s. "
                         "Try again when it is done, or end it."));
    std::this_thread::sleep_for(kStep);
  }
}

/// Descriptions leave first and come last, so that nobody takes a mixture for a model.
void move_files(const fs::path& ready, const fs::path& dir, const std::vector<std::string>& names) {
  const bool described = std::none_of(names.begin(), names.end(), [&](const std::string& name) {
    return is_description(name) && fs::exists(fs::symlink_status(ready / name));
  });
  if (!described) {
    for (const char* name : {"config.json", "tessera.json"}) remove_file(dir / name);
    sync_directory(dir);
  }
  for (const std::string& name : names_in(dir)) {
    if (is_model_file(name) && !is_description(name) &&
        std::find(names.begin(), names.end(), name) == names.end())
      remove_file(dir / name);
  }
  for (const bool last : {false, true}) {
    for (const std::string& name : names) {
      if (is_description(name) == last) move_file(ready / name, dir / name);
    }
    sync_directory(dir);
  }
}

void give_second_name(const fs::path& from, const fs::path& to) {
  if (fs::is_symlink(fs::symlink_status(from))) {
    std::error_code error;
    fs::copy_symlink(from, to, error);
    if (error) io_failed("create", to, error.value());
  } else if (::link(from.c_str(), to.c_str()) != 0) {
    copy_file_synced(from, to);  // not on every file system
  }
}

bool is_same_file(const fs::path& a, const fs::path& b) {
  struct stat one {
  }, two{};
  if (::lstat(a.c_str(), &one) != 0 || ::lstat(b.c_str(), &two) != 0) return false;
  return S_ISLNK(one.st_mode) || (one.st_dev == two.st_dev && one.st_ino == two.st_ino);
}

}  // namespace

bool is_model_file(const std::string& name) {
  return is_description(name) || name == kHfConfigCopy ||
         (name.starts_with("model") && name.find(".safetensors") != std::string::npos);
}

void finish_update(const fs::path& dir) {
  const fs::path ready = dir / kReadyUpdate;
  const File lock(::open(ready.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!lock.is_open()) return;
  wait_for_turn(lock, ready);
  if (fs::exists(fs::symlink_status(ready / kFiles))) {
    move_files(ready, dir, decided_files(ready));
    remove_file(ready / kFiles);
  }
  if (::rmdir(ready.c_str()) != 0 && errno != ENOENT) io_failed("remove", ready, errno);
}

void update_in_place(const fs::path& staging, const fs::path& dir) {
  finish_update(dir);
  const Json names = names_in(staging);
  write_text(staging / kFiles, to_text(names, 0));
  sync_directory(staging);
  rename_path(staging, dir / kReadyUpdate);  // decided
  try {
    sync_directory(dir);
  } catch (const Error&) {
    rename_path(dir / kReadyUpdate, staging);
    throw;
  }
  finish_update(dir);
}

bool is_exchangeable(const fs::path& dir) {
  struct stat own {
  }, above{};
  const fs::path parent = dir.parent_path().empty() ? fs::path(".") : dir.parent_path();
  if (::access(parent.c_str(), W_OK) != 0) return false;
  if (::stat(dir.c_str(), &own) != 0 || ::stat(parent.c_str(), &above) != 0) return false;
  if (own.st_dev != above.st_dev || own.st_uid != ::geteuid()) return false;
  std::error_code error;
  for (fs::path at = fs::current_path(error); !error; at = at.parent_path()) {
    if (fs::equivalent(at, dir, error)) return false;
    if (at == at.parent_path()) break;
  }
  for (const std::string& name : names_in(dir)) {
    const auto status = fs::symlink_status(dir / name, error);
    if (!fs::is_regular_file(status) && !fs::is_symlink(status)) return false;
  }
  return !error;
}

bool exchange_model(const fs::path& staging, const fs::path& dir) {
  const std::vector<std::string> own = names_in(staging);
  const auto is_others = [&](const std::string& name) {
    return !is_model_file(name) && std::find(own.begin(), own.end(), name) == own.end();
  };
  for (const std::string& name : names_in(dir)) {
    if (is_others(name)) give_second_name(dir / name, staging / name);
  }
  struct stat info {};
  if (::stat(dir.c_str(), &info) != 0 || ::chmod(staging.c_str(), info.st_mode & 07777) != 0)
    io_failed("inspect", dir, errno);
  sync_directory(staging);
  if (!exchange(staging, dir)) {
    if (errno != EINVAL && errno != ENOSYS) io_failed("rename to", dir, errno);
    for (const std::string& name : names_in(staging)) {
      if (is_others(name)) remove_file(staging / name);
    }
    return false;
  }
  // What somebody has put there meanwhile.
  for (const std::string& name : names_in(staging)) {
    if (is_others(name) && !is_same_file(staging / name, dir / name)) move_file(staging / name, dir / name);
  }
  return true;
}

}  // namespace tessera::checkpoint_detail
