#include "launch/host_secret.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

constexpr std::size_t kLongestSecret = 256;

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

bool only_mine(const struct stat& status) {
  return status.st_uid == ::geteuid() && (status.st_mode & 077) == 0;
}

constexpr const char* kRemedy = "; or set TESSERA_JOB_SECRET to one random text for all processes of the job";

/// Everything below goes through this descriptor, so that nobody can put another folder in its place. -1 if
/// there is none and none is to be made.
int open_folder(const std::string& file, bool make) {
  const std::string path = std::filesystem::path(file).parent_path().string();
  if (make && ::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw IoError(detail::concat(path, ": cannot be made: ", std::strerror(errno), kRemedy));
  Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  const bool opened = folder.get() >= 0 && ::fstat(folder.get(), &status) == 0;
  if (!opened && errno == ENOENT) return -1;
  TESSERA_ENSURE(ConfigError, opened || (errno != ELOOP && errno != ENOTDIR && errno != EACCES), path,
                 ": is not this user's folder, where the job's secret would lie (", std::strerror(errno),
                 "): remove it", kRemedy);
  TESSERA_ENSURE(IoError, opened, path, ": ", std::strerror(errno), kRemedy);
  TESSERA_ENSURE(ConfigError, status.st_uid == ::geteuid(), path, ": belongs to user ", status.st_uid,
                 ", and the job's secret would lie there: have it removed", kRemedy);
  TESSERA_ENSURE(ConfigError, (status.st_mode & 077) == 0, path,
                 ": others can enter it, and the job's secret would lie there: chmod 700 ", path, kRemedy);
  return folder.release();
}

/// A file of that name with `text`, there as a whole or not at all; -1 with errno if that failed.
int write_file(int folder, const std::string& name, const std::string& text) {
  const std::string staged = name + "." + random_secret().substr(0, 16);
  Descriptor file(
      ::openat(folder, staged.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (file.get() < 0) return -1;
  if (::fchmod(file.get(), 0600) == 0 &&
      ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
      ::renameat(folder, staged.c_str(), folder, name.c_str()) == 0) {
    return file.release();
  }
  const int reason = errno;
  ::unlinkat(folder, staged.c_str(), 0);
  errno = reason;
  return -1;
}

std::string name_of(const std::string& path) { return std::filesystem::path(path).filename().string(); }

}  // namespace

std::string host_secret_path(const std::string& name) {
  const std::string session = detail::concat("/run/user/", ::geteuid());
  struct stat status {};
  const bool usable = ::lstat(session.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
                      only_mine(status) && ::access(session.c_str(), W_OK) == 0;
  const std::string folder = usable ? session + "/tessera" : detail::concat("/tmp/tessera-", ::geteuid());
  return folder + "/" + name;
}

std::string random_secret() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::array<unsigned char, 32> bytes{};
  ssize_t got = 0;
  do {
    got = ::getrandom(bytes.data(), bytes.size(), 0);
  } while (got < 0 && errno == EINTR);
  TESSERA_ENSURE(IoError, got == static_cast<ssize_t>(bytes.size()), "the system gives no random bytes");
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

HostSecret::HostSecret(std::string path) : path_(std::move(path)), text_(random_secret()) {}

HostSecret::~HostSecret() {
  const std::string name = name_of(path_);
  struct stat mine {
  }, there{};
  if (file_ >= 0 && ::fstat(file_, &mine) == 0 &&
      ::fstatat(folder_, name.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 && mine.st_ino == there.st_ino &&
      mine.st_dev == there.st_dev) {
    ::unlinkat(folder_, name.c_str(), 0);
    ::rmdir(std::filesystem::path(path_).parent_path().c_str());  // if it is empty
  }
  if (file_ >= 0) ::close(file_);
  if (folder_ >= 0) ::close(folder_);
}

void HostSecret::publish() {
  // Another job of this user may remove the folder, which was empty, before the file is in it.
  constexpr int kTries = 100;
  for (int i = 0; i < kTries && file_ < 0; ++i) {
    if (folder_ >= 0) ::close(folder_);
    folder_ = open_folder(path_, true);
    if (folder_ < 0) continue;
    file_ = write_file(folder_, name_of(path_), text_);
    if (file_ < 0 && errno != ENOENT) break;
  }
  if (file_ < 0) throw IoError(detail::concat(path_, ": cannot be written: ", std::strerror(errno), kRemedy));
}

std::string read_host_secret(const std::string& path) {
  const Descriptor folder(open_folder(path, false));
  if (folder.get() < 0) return {};
  const Descriptor file(
      ::openat(folder.get(), name_of(path).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0 && errno == ENOENT) return {};
  struct stat status {};
  TESSERA_ENSURE(IoError, file.get() >= 0 && ::fstat(file.get(), &status) == 0, path, ": ",
                 std::strerror(errno), kRemedy);
  TESSERA_ENSURE(ConfigError, S_ISREG(status.st_mode) && only_mine(status), path,
                 ": is not a file that this user alone can read: remove it", kRemedy);
  std::string text(kLongestSecret, '\0');
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  TESSERA_ENSURE(IoError, got >= 0, path, ": ", std::strerror(errno), kRemedy);
  text.resize(static_cast<std::size_t>(got));
  return text;
}

}  // namespace tessera::launching
