#include "tessera/base/env.hpp"

#include <array>
#include <charconv>
#include <map>

#include "base/suggest.hpp"

extern char** environ;

namespace tessera {

namespace {

constexpr std::array kVariables{
    EnvironmentVariable{"RANK", "number of this process among all, from 0"},
    EnvironmentVariable{"WORLD_SIZE", "number of processes in all"},
    EnvironmentVariable{"LOCAL_RANK", "number of this process on its machine, from 0"},
    EnvironmentVariable{"LOCAL_WORLD_SIZE", "number of processes on this machine"},
    EnvironmentVariable{"MASTER_ADDR", "machine of rank 0, where the processes meet"},
    EnvironmentVariable{"MASTER_PORT", "port of that meeting point"},
    EnvironmentVariable{"NO_COLOR", "any value but the empty one: no colours on the terminal"},
    EnvironmentVariable{"TESSERA_LOG_LEVEL", "debug, info, warning or error"},
    EnvironmentVariable{"TESSERA_THREADS", "CPU threads per process where `device.threads` is 0"},
    EnvironmentVariable{"TESSERA_PYTHON", "the Python interpreter for the commands that need one"},
};

constexpr std::string_view kPrefix = "TESSERA_";

/// Reads variables one by one and collects what is wrong with them.
class Reader {
 public:
  explicit Reader(std::span<const std::string> variables) {
    for (const std::string& variable : variables) {
      const auto equals = variable.find('=');
      if (equals != std::string::npos)
        values_.emplace(variable.substr(0, equals), variable.substr(equals + 1));
    }
  }

  std::optional<std::string> text(const char* name) const {
    const auto found = values_.find(name);
    if (found == values_.end() || found->second.empty()) return std::nullopt;
    return found->second;
  }

  std::optional<std::int64_t> integer(const char* name, std::int64_t min, std::int64_t max) {
    const auto value = text(name);
    if (!value) return std::nullopt;
    std::int64_t number = 0;
    const char* end = value->data() + value->size();
    const auto [stop, error] = std::from_chars(value->data(), end, number);
    if (error != std::errc() || stop != end || number < min || number > max) {
      fault(name, " must be an integer from ", min, " to ", max, ", not '", *value, "'");
      return std::nullopt;
    }
    return number;
  }

  template <typename... Parts>
  void fault(const Parts&... parts) {
    faults_ += detail::concat(faults_.empty() ? "" : "\n", "environment variable ", parts...);
  }

  std::vector<std::string> unknown() const {
    std::vector<std::string_view> known;
    for (const EnvironmentVariable& variable : kVariables) {
      if (std::string_view(variable.name).starts_with(kPrefix)) known.emplace_back(variable.name);
    }
    std::vector<std::string> warnings;
    for (const auto& [name, value] : values_) {
      if (!name.starts_with(kPrefix)) continue;
      bool is_known = false;
      for (const std::string_view candidate : known) is_known = is_known || candidate == name;
      if (!is_known) {
        warnings.push_back("environment variable " + name + " means nothing to Tessera" +
                           suggest(name, known));
      }
    }
    return warnings;
  }

  void finish() const {
    if (!faults_.empty()) throw ConfigError(faults_);
  }

 private:
  std::map<std::string, std::string> values_;
  std::string faults_;
};

void check_pair(Reader& reader, const char* rank_name, const std::optional<std::int64_t>& rank,
                const char* size_name, const std::optional<std::int64_t>& size) {
  if (rank && !reader.text(size_name)) reader.fault(rank_name, " is set but ", size_name, " is not");
  if (size && !reader.text(rank_name)) reader.fault(size_name, " is set but ", rank_name, " is not");
  if (rank && size && *rank >= *size) {
    reader.fault(rank_name, " = ", *rank, " does not fit ", size_name, " = ", *size);
  }
}

}  // namespace

Environment read_environment(std::span<const std::string> variables) {
  constexpr std::int64_t kMostRanks = 1 << 24;
  Reader reader(variables);
  Environment env;
  env.rank = reader.integer("RANK", 0, kMostRanks - 1);
  env.world_size = reader.integer("WORLD_SIZE", 1, kMostRanks);
  env.local_rank = reader.integer("LOCAL_RANK", 0, kMostRanks - 1);
  env.local_world_size = reader.integer("LOCAL_WORLD_SIZE", 1, kMostRanks);
  check_pair(reader, "RANK", env.rank, "WORLD_SIZE", env.world_size);
  // LOCAL_RANK alone is common: some launchers leave the local size to be found out.
  if (env.local_rank && env.local_world_size && *env.local_rank >= *env.local_world_size) {
    reader.fault("LOCAL_RANK = ", *env.local_rank,
                 " does not fit LOCAL_WORLD_SIZE = ", *env.local_world_size);
  }
  env.master_addr = reader.text("MASTER_ADDR");
  env.master_port = reader.integer("MASTER_PORT", 0, 65535);
  env.no_color = reader.text("NO_COLOR").has_value();
  env.threads = reader.integer("TESSERA_THREADS", 1, 4096);
  env.python = reader.text("TESSERA_PYTHON");
  if (const auto level = reader.text("TESSERA_LOG_LEVEL")) {
    env.log_level = log_level(*level);
    if (!env.log_level) {
      reader.fault("TESSERA_LOG_LEVEL must be debug, info, warning or error, not '", *level, "'");
    }
  }
  env.warnings = reader.unknown();
  reader.finish();
  return env;
}

Environment read_environment() {
  std::vector<std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) variables.emplace_back(*entry);
  return read_environment(variables);
}

std::span<const EnvironmentVariable> environment_variables() { return kVariables; }

}  // namespace tessera
