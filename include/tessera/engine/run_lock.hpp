#pragma once
/// One job at a time in a folder: the file run.lock is a lease that names the process which works in it.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "tessera/base/log.hpp"

namespace tessera {

/// How long things take; tests make it short.
struct RunLockTimes {
  std::chrono::milliseconds renewal = std::chrono::seconds(20);  ///< between two counts of a holder
  /// How long a holder out of sight may go without counting, by our clock: three renewals.
  std::chrono::milliseconds silence = std::chrono::seconds(60);
  std::chrono::milliseconds look = std::chrono::milliseconds(500);    ///< between two looks at its count
  std::chrono::milliseconds settle = std::chrono::milliseconds(100);  ///< for who else takes over just now
  std::chrono::milliseconds part = std::chrono::seconds(5);  ///< that giving it back may take at the end
};

/// The lease is this process's while the object lives. run.lock holds host, boot, process, since when, a
/// token, the generation (one more with every holder) and a counter that a thread raises. It is taken over at
/// once when its process was on this machine and is gone, or has given it back; another machine's, when its
/// counter stands still while we watch: no clocks are compared. Machines are told apart by the kernel's boot
/// id, and containers on one by their process namespace. A holder that was stopped for so long that another
/// one took over finds that out before it publishes anything.
class RunLock {
 public:
  /// What run.lock said at some time.
  struct Sighting {
    std::string text = {};
    std::chrono::steady_clock::time_point time = {};
  };
  /// For who will take two leases and watches both at once. Errors: IoError.
  static Sighting sight(const std::filesystem::path& folder);

  /// Takes the lease of `folder`, which exists; it is on the disk then. `on_wait` is called with each look at
  /// a holder out of sight, which is watched since `seen` if it has not counted from then on. Errors:
  /// ConfigError naming the holder, if somebody works there; IoError.
  RunLock(const std::filesystem::path& folder, const Logger& log, const RunLockTimes& times,
          const std::function<void()>& on_wait, const Sighting& seen);
  RunLock(const std::filesystem::path& folder, const Logger& log, const RunLockTimes& times = {},
          const std::function<void()>& on_wait = {})
      : RunLock(folder, log, times, on_wait, Sighting{}) {}
  /// Gives it back: run.lock then names nobody, and keeps the generation.
  ~RunLock();
  RunLock(RunLock&&) noexcept;
  RunLock& operator=(RunLock&&) = delete;

  /// Before something is published: reads the file again. One that somebody removed is made again, unless so
  /// much time has passed that another job may have come and gone. Errors: ConfigError naming the new holder,
  /// if this one was taken for gone; IoError.
  void check_still_ours();
  /// The same by what the counting thread saw last, without reading. Errors: ConfigError.
  void refuse_if_seen_lost() const;
  std::int64_t generation() const;

  /// Errors: ConfigError if a living process of this machine holds the lease of `folder`. Changes nothing.
  static void refuse_if_held(const std::filesystem::path& folder);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // shared with the counting thread, which a dead file system may hold for ever
};

constexpr const char* kRunLockName = "run.lock";

/// `bytes` random bytes of the system in hexadecimal. Errors: IoError.
std::string random_name(std::size_t bytes);

/// The time of day as "2026-01-31T23:59:59Z", for people.
std::string utc_time();

}  // namespace tessera
