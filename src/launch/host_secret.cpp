#include "launch/host_secret.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
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

bool only_mine(const struct stat& status) { return status.st_uid == ::geteuid() && (status.st_mode & 077) == 0; }

/// The session's folder where there is one, which nobody else can have made; else one below /tmp.
std::string folder_path() {
  const std::string session = detail::concat("/run/user/", ::geteuid());
  struct stat status {};
  const bool usable = ::lstat(session.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && only_mine(status) &&
                      ::access(session.c_str(), W_OK) == 0;
  return usable ? session + "/tessera" : detail::concat("/tmp/tessera-", ::geteuid());
}

constexpr const char* kRemedy = "; or set TESSERA_JOB_SECRET to one random text for all processes of the job";

/// Everything below goes through this descriptor, so that nobody can put another folder in its place.
int open_folder() {
  const std::string path = folder_path();
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw IoError(detail::concat(path, ": cannot be made: ", std::strerror(errno), kRemedy));
  Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  const bool opened = folder.get() >= 0 && ::fstat(folder.get(), &status) == 0;
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

}  // namespace

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

HostSecret::HostSecret(std::string name) : name_(std::move(name)), text_(random_secret()) {}

HostSecret::~HostSecret() {
  struct stat mine {}, there {};
  if (file_ >= 0 && ::fstat(file_, &mine) == 0 && ::fstatat(folder_, name_.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
      mine.st_ino == there.st_ino && mine.st_dev == there.st_dev) {
    ::unlinkat(folder_, name_.c_str(), 0);
  }
  if (file_ >= 0) ::close(file_);
  if (folder_ >= 0) ::close(folder_);
}

void HostSecret::publish() {
  folder_ = open_folder();
  const std::string staged = name_ + "." + random_secret().substr(0, 16);
  Descriptor file(::openat(folder_, staged.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  const bool written = file.get() >= 0 && ::fchmod(file.get(), 0600) == 0 &&
                       ::write(file.get(), text_.data(), text_.size()) == static_cast<ssize_t>(text_.size());
  if (!written || ::renameat(folder_, staged.c_str(), folder_, name_.c_str()) != 0) {
    const int reason = errno;
    ::unlinkat(folder_, staged.c_str(), 0);
    throw IoError(
        detail::concat(host_secret_path(name_), ": cannot be written: ", std::strerror(reason), kRemedy));
  }
  file_ = file.release();
}

std::string read_host_secret(const std::string& name) {
  const Descriptor folder(open_folder());
  const Descriptor file(
      ::openat(folder.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0 && errno == ENOENT) return {};
  struct stat status {};
  TESSERA_ENSURE(IoError, file.get() >= 0 && ::fstat(file.get(), &status) == 0, host_secret_path(name), ": ",
                 std::strerror(errno), kRemedy);
  TESSERA_ENSURE(ConfigError, S_ISREG(status.st_mode) && only_mine(status), host_secret_path(name),
                 ": is not a file that this user alone can read: remove it", kRemedy);
  std::string text(kLongestSecret, '\0');
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  TESSERA_ENSURE(IoError, got >= 0, host_secret_path(name), ": ", std::strerror(errno), kRemedy);
  text.resize(static_cast<std::size_t>(got));
  return text;
}

std::string host_secret_path(const std::string& name) { return folder_path() + "/" + name; }

}  // namespace tessera::launching
