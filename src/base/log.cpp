#include "tessera/base/log.hpp"

#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <mutex>
#include <unordered_set>
#include <vector>

namespace tessera {

namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

LogLevel from_spdlog(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
    case spdlog::level::debug:
      return LogLevel::debug;
    case spdlog::level::info:
      return LogLevel::info;
    case spdlog::level::warn:
      return LogLevel::warning;
    default:
      return LogLevel::error;
  }
}

class CallbackSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit CallbackSink(std::function<void(LogLevel, std::string_view)> callback)
      : callback_(std::move(callback)) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    callback_(from_spdlog(message.level), {message.payload.data(), message.payload.size()});
  }
  void flush_() override {}

 private:
  std::function<void(LogLevel, std::string_view)> callback_;
};

std::string pattern(const LogOptions& options) {
  const std::string rank = options.world_size > 1 ? detail::concat("[rank ", options.rank, "] ") : "";
  return "%H:%M:%S %^%l%$ " + rank + "%v";
}

std::vector<spdlog::sink_ptr> make_sinks(const LogOptions& options) {
  std::vector<spdlog::sink_ptr> sinks;
  if (options.console) {
    // The automatic mode writes colours only to a terminal that knows them.
    const auto mode = options.no_color ? spdlog::color_mode::never : spdlog::color_mode::automatic;
    sinks.push_back(std::make_shared<spdlog::sinks::stderr_color_sink_mt>(mode));
  }
  if (!options.file.empty()) {
    try {
      sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file, false));
    } catch (const spdlog::spdlog_ex& error) {
      throw IoError(detail::concat("log file ", options.file, ": ", error.what()));
    }
  }
  if (options.callback) sinks.push_back(std::make_shared<CallbackSink>(options.callback));
  return sinks;
}

}  // namespace

std::string_view name_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return "debug";
    case LogLevel::info:
      return "info";
    case LogLevel::warning:
      return "warning";
    case LogLevel::error:
      return "error";
  }
  return "unknown";
}

std::optional<LogLevel> log_level(std::string_view name) {
  for (const LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error}) {
    if (name == name_of(level)) return level;
  }
  return std::nullopt;
}

struct Logger::State {
  State(LogLevel level, const std::vector<spdlog::sink_ptr>& sinks)
      : level(level), logger("tessera", sinks.begin(), sinks.end()) {}

  LogLevel level;
  spdlog::logger logger;
  std::mutex mutex;
  std::unordered_set<std::string> said;
};

Logger::Logger(const LogOptions& options)
    : state_(std::make_shared<State>(options.level, make_sinks(options))) {
  state_->logger.set_pattern(pattern(options));
  state_->logger.set_level(to_spdlog(options.level));
  // A line that explains a crash must not be lost in a buffer.
  state_->logger.flush_on(spdlog::level::debug);
}

Logger Logger::silent() { return Logger(LogOptions{.level = LogLevel::error, .console = false}); }

LogLevel Logger::level() const { return state_->level; }

void Logger::write(LogLevel level, std::string_view message) const {
  state_->logger.log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

void Logger::flush() const { state_->logger.flush(); }

bool Logger::first_time(std::string_view key) const {
  const std::lock_guard lock(state_->mutex);
  return state_->said.emplace(key).second;
}

}  // namespace tessera
