#include "tessera/engine/run_lock.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "checkpoint/file_io.hpp"
#include "engine/run_holder.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using checkpoint_detail::File;
using Clock = std::chrono::steady_clock;

/// Nothing if there is no such file. Errors: IoError.
std::optional<std::string> read_lock(const fs::path& path) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file.is_open()) {
    if (errno == ENOENT) return std::nullopt;
    checkpoint_detail::io_failed("open", path, errno);
  }
  constexpr std::size_t kLongest = std::size_t{1} << 16;
  std::string text(kLongest, '\0');
  const ssize_t got = ::pread(file.fd(), text.data(), text.size(), 0);
  if (got < 0) checkpoint_detail::io_failed("read", path, errno);
  text.resize(static_cast<std::size_t>(got));
  return text;
}

void write_whole(const File& file, const std::string& text, const fs::path& path) {
  checkpoint_detail::write_exactly(file, path, 0, std::as_bytes(std::span(text)), text.size());
  checkpoint_detail::sync_file(file, path);
}

[[noreturn]] void refuse(const fs::path& folder, const RunHolder& holder) {
  throw ConfigError(detail::concat(folder.string(), " is in use: process ", holder.pid, " on ", holder.host,
                                   " has worked in it since ", holder.since,
                                   ". Wait for its end or stop it, or give this job a folder of its own "
                                   "(logging.dir and checkpoint.dir; in Python project_dir)"));
}

/// Seconds that pass while the machine sleeps, too.
std::chrono::nanoseconds uptime() {
  std::timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

long long in_seconds(std::chrono::milliseconds time) {
  return std::chrono::duration_cast<std::chrono::seconds>(time).count();
}

}  // namespace

std::string random_name(std::size_t bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  while (text.size() < 2 * bytes) {
    unsigned char byte = 0;
    if (getrandom(&byte, 1, 0) != 1) {
      TESSERA_ENSURE(IoError, errno == EINTR, "the system gives no random bytes: ", std::strerror(errno));
      continue;
    }
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

std::string utc_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

struct RunLock::Impl {
  Impl(const fs::path& where, const Logger& logger, const RunLockTimes& given,
       const std::function<void()>& on_wait, const Sighting& seen)
      : folder(where), path(where / kRunLockName), log(logger), times(given), own(RunHolder::self()) {
    acquire(on_wait, seen);
  }

  void acquire(const std::function<void()>& on_wait, const Sighting& seen) {
    for (;;) {
      const std::optional<std::string> text = read_lock(path);
      const auto holder = RunHolder::parse(text.value_or(""));
      if (!text) {
        own.generation = 1;
        if (create()) return;
        continue;
      }
      own.generation = holder ? holder->generation + 1 : 1;
      if (holder && !holder->released && holder->is_within_sight()) {
        if (holder->lives()) refuse(folder, *holder);
      } else if (!(holder && holder->released) &&
                 !stands_still({*text, seen.text == *text ? seen.time : Clock::now()}, holder, on_wait)) {
        continue;
      }
      if (!take_over(*text)) continue;
      if (holder && !holder->released)
        log.info(path.string(), " is taken over: process ", holder->pid, " on ", holder->host, " is gone");
      return;
    }
  }

  /// A file of ours beside run.lock, whole and on the disk.
  std::shared_ptr<File> write_beside(const fs::path& temporary) const {
    auto made = std::make_shared<File>(checkpoint_detail::create_file(temporary));
    try {
      write_whole(*made, own.text(0), temporary);
    } catch (...) {
      ::unlink(temporary.c_str());
      throw;
    }
    return made;
  }

  /// False if the file is there already. It appears whole, where the file system has hard links.
  bool create() {
    const fs::path temporary = path.string() + "." + own.token;
    auto made = write_beside(temporary);
    const int linked = ::link(temporary.c_str(), path.c_str());
    const int error = errno;
    ::unlink(temporary.c_str());
    if (linked != 0 && error == EEXIST) return false;
    if (linked != 0) {
      *made = File(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
      if (!made->is_open() && errno == EEXIST) return false;
      if (!made->is_open()) checkpoint_detail::io_failed("create", path, errno);
      write_whole(*made, own.text(0), path);
    }
    checkpoint_detail::sync_directory(folder);
    hold(std::move(made));
    return true;
  }

  /// Watches a holder whose process cannot be seen from here: true if it does not count for long enough,
  /// false if the file is another's now. One that counts is refused.
  bool stands_still(const Sighting& first, const std::optional<RunHolder>& holder,
                    const std::function<void()>& on_wait) {
    if (Clock::now() - first.time >= times.silence) return true;
    log.warning(path.string(), " belongs to ",
                holder
                    ? detail::concat("process ", holder->pid, " on ", holder->host, " since ", holder->since)
                    : "a process that does not say its name",
                ": waiting up to ", in_seconds(times.silence), " s to see whether it still runs");
    while (Clock::now() - first.time < times.silence) {
      if (on_wait) on_wait();
      std::this_thread::sleep_for(times.look);
      const std::optional<std::string> now = read_lock(path);
      if (now == first.text) continue;
      const auto later = RunHolder::parse(now.value_or(""));
      if (holder && later && later->token == holder->token && !later->released) refuse(folder, *holder);
      return false;
    }
    return true;
  }

  /// Puts our file in the place of a dead one, if that still says `text`. Of several who do that at once the
  /// last one's stays: all look again a moment later, and before they publish.
  bool take_over(const std::string& text) {
    const fs::path temporary = path.string() + "." + own.token;
    auto made = write_beside(temporary);
    if (read_lock(path) != text || ::rename(temporary.c_str(), path.c_str()) != 0) {
      ::unlink(temporary.c_str());
      return false;
    }
    checkpoint_detail::sync_directory(folder);
    std::this_thread::sleep_for(times.settle);
    if (!is_ours(read_lock(path))) return false;
    hold(std::move(made));
    return true;
  }

  void hold(std::shared_ptr<File> made) {
    const std::lock_guard lock(mutex);
    file = std::move(made);
    proved = uptime();
  }

  bool is_ours(const std::optional<std::string>& text) const {
    const auto holder = RunHolder::parse(text.value_or(""));
    return holder && holder->token == own.token;
  }

  void check() {
    std::optional<std::string> text = read_lock(path);
    const bool nobody_came = !lost && uptime() - proved.load() <= times.silence;
    if (!text && nobody_came) {
      if (create()) return;
      text = read_lock(path);
    }
    if (!is_ours(text)) lose(text);
    proved = uptime();
  }

  [[noreturn]] void lose(const std::optional<std::string>& text) {
    lost = true;
    const auto holder = RunHolder::parse(text.value_or(""));
    throw ConfigError(detail::concat(
        folder.string(), " is this job's no more: it was taken for gone, as it gave no sign of life for ",
        in_seconds(times.silence), " s, and ",
        holder ? detail::concat("process ", holder->pid, " on ", holder->host, " has taken over at ",
                                holder->since, holder->released ? " and has ended since" : "")
               : "its run.lock was removed",
        ". Nothing is written any more; what was trained here since the last checkpoint is not kept"));
  }

  /// Counts in the file itself: once somebody has put another in its place, nobody sees this one. At the end
  /// the lease is given back the same way.
  void renew() {
    std::int64_t count = 1;
    for (std::unique_lock lock(mutex);; ++count) {
      const bool last = wake.wait_for(lock, times.renewal, [this] { return ending; });
      const std::shared_ptr<File> mine = file;
      lock.unlock();
      RunHolder holder = own;
      holder.released = last;
      write_count(*mine, holder.text(count, own.text(count).size()));
      if (!last) look();
      lock.lock();
      if (last) break;
    }
    ended = true;
    wake.notify_all();
  }

  /// A count that a full or absent disk swallows is made up for by the next.
  static void write_count(const File& mine, const std::string& text) {
    if (::pwrite(mine.fd(), text.data(), text.size(), 0) > 0) ::fdatasync(mine.fd());
  }

  void look() {
    try {
      const auto text = read_lock(path);
      if (text && is_ours(text)) proved = uptime();
      if (text && RunHolder::parse(*text) && !is_ours(text)) lost = true;
    } catch (const IoError&) {
      // The next publish says what is wrong.
    }
  }

  const fs::path folder, path;
  const Logger log;
  const RunLockTimes times;
  RunHolder own;
  std::mutex mutex;
  std::condition_variable wake;
  std::shared_ptr<File> file;
  bool ending = false, ended = false;
  std::atomic<bool> lost = false;
  std::atomic<std::chrono::nanoseconds> proved{};  // when the file was last seen to be ours
  std::thread renewer;
};

RunLock::Sighting RunLock::sight(const fs::path& folder) {
  return {read_lock(folder / kRunLockName).value_or(""), Clock::now()};
}

RunLock::RunLock(const fs::path& folder, const Logger& log, const RunLockTimes& times,
                 const std::function<void()>& on_wait, const Sighting& seen)
    : impl_(std::make_shared<Impl>(folder, log, times, on_wait, seen)) {
  impl_->renewer = std::thread([impl = impl_] { impl->renew(); });
}

RunLock::RunLock(RunLock&&) noexcept = default;

RunLock::~RunLock() {
  if (!impl_) return;
  std::unique_lock lock(impl_->mutex);
  impl_->ending = true;
  impl_->wake.notify_all();
  const bool ended = impl_->wake.wait_for(lock, impl_->times.part, [this] { return impl_->ended; });
  std::thread renewer = std::move(impl_->renewer);
  lock.unlock();
  if (ended)
    renewer.join();
  else
    renewer.detach();  // the file system does not answer
}

void RunLock::check_still_ours() { impl_->check(); }

void RunLock::refuse_if_seen_lost() const {
  if (impl_->lost) impl_->check();
}

std::int64_t RunLock::generation() const { return impl_->own.generation; }

void RunLock::refuse_if_held(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return;
  const auto holder = RunHolder::parse(read_lock(folder / kRunLockName).value_or(""));
  if (holder && !holder->released && holder->is_within_sight() && holder->lives()) refuse(folder, *holder);
}

}  // namespace tessera
