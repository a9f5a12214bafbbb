#pragma once
/// The machines of a job, as a file in DeepSpeed's form lists them.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/launch/settings.hpp"

namespace tessera::launching {

struct Host {
  std::string name;        ///< as ssh takes it
  std::vector<int> slots;  ///< a process for each; their numbers are those of GPUs
  bool picked = false;     ///< some of its slots were left out: the processes are to see no other GPUs

  friend bool operator==(const Host&, const Host&) = default;
};

/// One "NAME slots=N" a line; empty lines and what follows a '#' are passed over. `name` stands for the file
/// in messages. Errors: ConfigError, one line per fault: "file:line: message".
std::vector<Host> parse_hostfile(std::string_view text, const std::string& name);

/// Those that `include` names, or all but what `exclude` names: "NAME[:SLOT,SLOT...]", several joined by '@'.
/// The order is the file's. Errors: ConfigError if both are given, a name or slot is unknown, or nothing is
/// left.
std::vector<Host> pick_hosts(std::vector<Host> hosts, const std::string& include, const std::string& exclude);

/// The GPUs that its processes are to see, as CUDA_VISIBLE_DEVICES has them; nullopt = all.
std::optional<std::string> visible_gpus(const Host& host);

/// The hosts of these settings, whose file and filters give way to what they say: num_machines,
/// num_processes, main_process_ip and, where there is a machine_rank, the GPUs of that machine. Errors:
/// ConfigError.
std::vector<Host> resolve_hosts(LaunchSettings& settings);

}  // namespace tessera::launching
