#pragma once
/// Logging: an object that the program creates and hands down. Nothing is global; two ranks in one process
/// have two loggers.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/error.hpp"

namespace tessera {

enum class LogLevel { debug, info, warning, error };

/// "debug", "info", "warning" or "error".
std::string_view name_of(LogLevel level);
/// The level of that name; nullopt if there is none.
std::optional<LogLevel> log_level(std::string_view name);

struct LogOptions {
  LogLevel level = LogLevel::info;
  int rank = 0;
  int world_size = 1;     ///< above 1, every line begins with "[rank N]"
  bool console = true;    ///< write to stderr
  bool no_color = false;  ///< no colours even on a terminal (Environment::no_color)
  std::string file = {};  ///< append to this file too; empty = none
  /// Also called with every line at or above `level`, without time and prefix; calls never overlap.
  std::function<void(LogLevel, std::string_view)> callback = {};
};

/// Writes lines to stderr, a file, a callback. Copies share one log. Every function may be called from any
/// thread.
class Logger {
 public:
  /// Errors: IoError if the file cannot be opened.
  explicit Logger(const LogOptions& options = {});
  /// A logger that writes nowhere.
  static Logger silent();

  LogLevel level() const;
  bool enabled(LogLevel level) const { return level >= this->level(); }

  /// Logs the parts joined together: log.info("step ", step, " of ", steps).
  template <typename... Parts>
  void debug(const Parts&... parts) const {
    log(LogLevel::debug, parts...);
  }
  template <typename... Parts>
  void info(const Parts&... parts) const {
    log(LogLevel::info, parts...);
  }
  template <typename... Parts>
  void warning(const Parts&... parts) const {
    log(LogLevel::warning, parts...);
  }
  template <typename... Parts>
  void error(const Parts&... parts) const {
    log(LogLevel::error, parts...);
  }
  /// A warning said only the first time this log meets `key`. Returns whether it was said.
  template <typename... Parts>
  bool warn_once(std::string_view key, const Parts&... parts) const {
    if (!first_time(key)) return false;
    log(LogLevel::warning, parts...);
    return true;
  }
  template <typename... Parts>
  void log(LogLevel level, const Parts&... parts) const {
    if (enabled(level)) write(level, detail::concat(parts...));
  }
  /// One finished line.
  void write(LogLevel level, std::string_view message) const;
  /// Hands everything written so far to the operating system.
  void flush() const;

 private:
  struct State;
  bool first_time(std::string_view key) const;

  std::shared_ptr<State> state_;
};

}  // namespace tessera
