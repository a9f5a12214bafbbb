#include "engine/run_holder.hpp"

#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/host_name.hpp"
#include "base/json_reason.hpp"
#include "tessera/base/error.hpp"
#include "tessera/engine/run_lock.hpp"

namespace tessera {
namespace {

std::string first_line(const char* path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
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

std::string boot_id() { return first_line("/proc/sys/kernel/random/boot_id"); }

std::string process_namespace() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
}

}  // namespace

RunHolder RunHolder::self() {
  const std::int64_t pid = ::getpid();
  return {.host = host_name(),
          .boot = boot_id(),
          .processes = process_namespace(),
          .pid = pid,
          .started = look_up(pid).value_or(ProcessFacts{}).started,
          .since = utc_time(),
          .token = random_name(16)};
}

std::string RunHolder::text(std::int64_t count, std::size_t least_bytes) const {
  nlohmann::json json{{"host", host},   {"boot", boot},       {"processes", processes},
                      {"pid", pid},     {"started", started}, {"since", since},
                      {"token", token}, {"count", count},     {"generation", generation}};
  if (released) json["released"] = true;
  std::string text = json.dump();
  if (text.size() + 1 < least_bytes) text.resize(least_bytes - 1, ' ');
  return text + "\n";
}

std::optional<RunHolder> RunHolder::parse(const std::string& text) {
  try {
    const auto json = nlohmann::json::parse(text);
    return RunHolder{.host = json.at("host"),
                     .boot = json.at("boot"),
                     .processes = json.at("processes"),
                     .pid = whole_number<decltype(RunHolder::pid)>(json.at("pid")),
                     .started = json.at("started"),
                     .since = json.at("since"),
                     .token = json.at("token"),
                     .generation = whole_number_or(json, "generation", std::int64_t{0}),
                     .released = json.value("released", false)};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

bool RunHolder::is_within_sight() const {
  return !boot.empty() && boot == boot_id() && processes == process_namespace();
}

bool RunHolder::lives() const {
  const auto facts = look_up(pid);
  return facts && facts->started == started && facts->state != 'Z' && facts->state != 'X';
}

}  // namespace tessera
