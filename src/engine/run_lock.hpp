#pragma once
/// One job at a time in a folder: the file run.lock names the process that works in it.

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "tessera/base/log.hpp"

namespace tessera {

/// How long things take; tests make it short.
struct RunLockTimes {
  std::chrono::milliseconds renewal = std::chrono::seconds(20);  ///< between two counts of a holder
  /// How long a holder of another machine may go without counting, by our clock.
  std::chrono::milliseconds silence = std::chrono::seconds(60);
  std::chrono::milliseconds look = std::chrono::milliseconds(500);    ///< between two looks at its count
  std::chrono::milliseconds settle = std::chrono::milliseconds(100);  ///< for who else takes over just now
};

/// The lock is this process's while the object lives. run.lock holds host, boot, process, since when, and a
/// counter that a thread raises. A lock is taken over at once when its process was on this machine and is
/// gone; another machine's, when its counter stands still while we watch: no clocks are compared. Machines
/// are told apart by the kernel's boot id, and containers on one by their process namespace.
class RunLock {
 public:
  /// Locks `folder`, which exists. Errors: ConfigError naming the holder, if somebody works there; IoError.
  RunLock(const std::filesystem::path& folder, const Logger& log, const RunLockTimes& times = {});
  ~RunLock();
  RunLock(RunLock&&) noexcept;
  RunLock& operator=(RunLock&&) = delete;

  /// Reads the file again, and makes it again if somebody removed it. Errors: ConfigError naming the new
  /// holder, if another machine took this one for gone.
  void check_still_ours();

  /// Errors: ConfigError if a living process of this machine holds the lock of `folder`. Changes nothing.
  static void refuse_if_held(const std::filesystem::path& folder);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

constexpr const char* kRunLockName = "run.lock";

/// `bytes` random bytes of the system in hexadecimal. Errors: IoError.
std::string random_name(std::size_t bytes);

/// The time of day as "2026-01-31T23:59:59Z", for people.
std::string utc_time();

}  // namespace tessera
