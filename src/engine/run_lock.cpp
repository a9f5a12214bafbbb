#include "engine/run_lock.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string system_error() { return std::strerror(errno); }

std::string first_line(const char* path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

std::string read_all(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A process: state, and when it was started, in clock ticks since boot.
struct ProcessFacts {
  char state = 'X';
  std::uint64_t started = 0;
};

/// Nothing if there is no such process.
std::optional<ProcessFacts> look_up(std::int64_t pid) {
  const std::string line = first_line(detail::concat("/proc/", pid, "/stat").c_str());
  const std::size_t name_end = line.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessFacts facts;
  std::string skipped;
  fields >> facts.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  if (!(fields >> facts.started)) return std::nullopt;
  return facts;
}

std::string process_namespace() {
  std::error_code error;
  return fs::read_symlink("/proc/self/ns/pid", error).string();
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

/// What run.lock says.
struct Holder {
  std::string host, boot, processes;
  std::int64_t pid = 0;
  std::uint64_t started = 0;
  std::string since, token;

  static Holder self() {
    const std::int64_t pid = ::getpid();
    return {host_name(),
            first_line("/proc/sys/kernel/random/boot_id"),
            process_namespace(),
            pid,
            look_up(pid).value_or(ProcessFacts{}).started,
            utc_time(),
            random_name(16)};
  }

  std::string text(std::int64_t count) const {
    return nlohmann::json{{"host", host},       {"boot", boot},   {"processes", processes}, {"pid", pid},
                          {"started", started}, {"since", since}, {"token", token},         {"count", count}}
               .dump() +
           "\n";
  }

  /// Nothing if `text` is not whole: its writer is at it, or was killed.
  static std::optional<Holder> parse(const std::string& text) {
    try {
      const auto json = nlohmann::json::parse(text);
      return Holder{json.at("host"),    json.at("boot"),  json.at("processes"), json.at("pid"),
                    json.at("started"), json.at("since"), json.at("token")};
    } catch (const nlohmann::json::exception&) {
      return std::nullopt;
    }
  }

  /// Whether /proc of this process shows it.
  bool is_within_sight() const {
    return !boot.empty() && boot == first_line("/proc/sys/kernel/random/boot_id") &&
           processes == process_namespace();
  }

  bool lives() const {
    const auto facts = look_up(pid);
    return facts && facts->started == started && facts->state != 'Z' && facts->state != 'X';
  }
};

[[noreturn]] void refuse(const fs::path& folder, const Holder& holder) {
  throw ConfigError(detail::concat(folder.string(), " is in use: process ", holder.pid, " on ", holder.host,
                                   " has worked in it since ", holder.since,
                                   ". Wait for its end or stop it, or give this run a logging.dir (and "
                                   "checkpoint.dir) of its own"));
}

void write_whole(int file, const std::string& text, const fs::path& path) {
  const ssize_t n = ::pwrite(file, text.data(), text.size(), 0);
  TESSERA_ENSURE(IoError, n == static_cast<ssize_t>(text.size()), "cannot write ", path.string(), ": ",
                 system_error());
}

}  // namespace

std::string random_name(std::size_t bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  while (text.size() < 2 * bytes) {
    unsigned char byte = 0;
    if (getrandom(&byte, 1, 0) != 1) {
      TESSERA_ENSURE(IoError, errno == EINTR, "the system gives no random bytes: ", system_error());
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
  Impl(const fs::path& where, const Logger& logger, const RunLockTimes& given)
      : folder(where), path(where / kRunLockName), log(logger), times(given), own(Holder::self()) {
    acquire();
    renewer = std::thread([this] { renew(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      ending = true;
    }
    wake.notify_all();
    renewer.join();
    if (is_ours()) ::unlink(path.c_str());
    ::close(file);
  }

  void acquire() {
    while (!create()) {
      const std::string text = read_all(path);
      const auto holder = Holder::parse(text);
      if (holder && holder->is_within_sight()) {
        if (holder->lives()) refuse(folder, *holder);
      } else if (!stands_still(text, holder)) {
        continue;
      }
      if (take_over(text)) {
        if (holder)
          log.info(path.string(), " is taken over: process ", holder->pid, " on ", holder->host, " is gone");
        return;
      }
    }
  }

  /// False if the file is there already.
  bool create() {
    file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file < 0 && errno == EEXIST) return false;
    TESSERA_ENSURE(IoError, file >= 0, "cannot make ", path.string(), ": ", system_error());
    try {
      write_whole(file, own.text(0), path);
    } catch (...) {
      ::unlink(path.c_str());
      ::close(file);
      throw;
    }
    return true;
  }

  /// Watches a holder whose process cannot be seen from here: true if it does not count for long enough,
  /// false if the file is another's now. One that counts is refused.
  bool stands_still(const std::string& text, const std::optional<Holder>& holder) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    log.warning(path.string(), " belongs to ",
                holder
                    ? detail::concat("process ", holder->pid, " on ", holder->host, " since ", holder->since)
                    : "a process that does not say its name",
                ": waiting up to ", std::chrono::duration_cast<std::chrono::seconds>(times.silence).count(),
                " s to see whether it still runs");
    while (Clock::now() - begin < times.silence) {
      std::this_thread::sleep_for(times.look);
      const std::string now = read_all(path);
      if (now == text) continue;
      const auto later = Holder::parse(now);
      if (holder && later && later->token == holder->token) refuse(folder, *holder);
      return false;
    }
    return true;
  }

  /// Puts our file in the place of a dead one, if that still says `text`. Of several who do that at once the
  /// last one's stays: all look again a moment later.
  bool take_over(const std::string& text) {
    const fs::path temporary = path.string() + "." + own.token;
    file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    TESSERA_ENSURE(IoError, file >= 0, "cannot make ", temporary.string(), ": ", system_error());
    bool renamed = false;
    try {
      write_whole(file, own.text(0), temporary);
      renamed = read_all(path) == text && ::rename(temporary.c_str(), path.c_str()) == 0;
      if (renamed) std::this_thread::sleep_for(times.settle);
    } catch (...) {
      ::unlink(temporary.c_str());
      ::close(file);
      throw;
    }
    if (renamed && is_ours()) return true;
    if (!renamed) ::unlink(temporary.c_str());
    ::close(file);
    return false;
  }

  /// Whether the file is ours; one that somebody removed is made again.
  bool keep() {
    const std::lock_guard lock(mutex);
    if (is_ours()) return true;
    if (fs::exists(path)) return false;
    const int removed = file;
    if (!create()) {
      file = removed;
      return is_ours();
    }
    ::close(removed);
    return true;
  }

  bool is_ours() const {
    const auto holder = Holder::parse(read_all(path));
    return holder && holder->token == own.token;
  }

  /// Counts in the file itself: once somebody has put another in its place, nobody sees this one.
  void renew() {
    std::unique_lock lock(mutex);
    for (std::int64_t count = 1; !wake.wait_for(lock, times.renewal, [this] { return ending; }); ++count) {
      const std::string text = own.text(count);
      // A count that a full or absent disk swallows is made up for by the next.
      [[maybe_unused]] const ssize_t n = ::pwrite(file, text.data(), text.size(), 0);
    }
  }

  const fs::path folder, path;
  const Logger log;
  const RunLockTimes times;
  const Holder own;
  int file = -1;
  std::mutex mutex;
  std::condition_variable wake;
  bool ending = false;
  std::thread renewer;
};

RunLock::RunLock(const fs::path& folder, const Logger& log, const RunLockTimes& times)
    : impl_(std::make_unique<Impl>(folder, log, times)) {}
RunLock::~RunLock() = default;
RunLock::RunLock(RunLock&&) noexcept = default;

void RunLock::check_still_ours() {
  if (impl_->keep()) return;
  const auto holder = Holder::parse(read_all(impl_->path));
  TESSERA_ENSURE(ConfigError, holder, impl_->path.string(), " is not this run's any more: start again");
  refuse(impl_->folder, *holder);
}

void RunLock::refuse_if_held(const fs::path& folder) {
  const auto holder = Holder::parse(read_all(folder / kRunLockName));
  if (holder && holder->is_within_sight() && holder->lives()) refuse(folder, *holder);
}

}  // namespace tessera
