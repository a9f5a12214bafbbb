#pragma once
/// A secret in common for the processes that one user has on this machine, where their launcher gives none: a
/// file that only this user can read, for as long as they need to find each other.

#include <string>

namespace tessera::launching {

/// 32 random bytes in hexadecimal. Errors: IoError.
std::string random_secret();

/// Where the file of that name lies: in the session's folder where there is one, which nobody else can have
/// made, or below /tmp, in a folder of this user's. `name` is the same in all processes of the job.
std::string host_secret_path(const std::string& name);

/// A new secret, of the process the others come to.
class HostSecret {
 public:
  /// Errors: IoError.
  explicit HostSecret(std::string path);
  /// Removes the file, unless somebody has replaced it, and the folder if it is empty.
  ~HostSecret();
  HostSecret(const HostSecret&) = delete;
  HostSecret& operator=(const HostSecret&) = delete;
  const std::string& text() const { return text_; }
  /// Writes the file; it is there as a whole or not at all. One that an earlier job has left is replaced.
  /// Errors: IoError naming the file; ConfigError if its folder is not this user's alone.
  void publish();

 private:
  std::string path_, text_;
  int folder_ = -1, file_ = -1;
};

/// What is published there; empty if nothing is. Errors: ConfigError, IoError, as publish; ConfigError for a
/// file that is not this user's alone.
std::string read_host_secret(const std::string& path);

}  // namespace tessera::launching
