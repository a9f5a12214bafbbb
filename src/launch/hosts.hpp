#pragma once
/// A job on several machines from one place: a launcher on each, started over ssh.

#include <string>
#include <vector>

#include "launch/hostfile.hpp"
#include "tessera/launch/launch.hpp"

namespace tessera::launching {

struct HostsJob {
  std::vector<Host> hosts;
  LaunchSettings settings;               ///< as resolve_hosts has left them
  std::vector<std::string> launcher;     ///< the command of a launcher that reads its orders, and the program
  std::string folder;                    ///< where it starts, the same on all machines
  std::vector<std::string> environment;  ///< "NAME=value", of this process
  std::string secret;                    ///< of the job
};

/// The settings of the launcher on one of the hosts: its rank, the job's secret, the variables it is to have
/// as this process. Errors: ConfigError if export_env names one that is not set.
LaunchSettings settings_of_host(const HostsJob& job, std::size_t host);

/// What starts it, as a command of this machine: ssh, or the shell itself for a name that is this machine's.
std::vector<std::string> command_of_host(const HostsJob& job, std::size_t host);

/// Runs the job to its end. Signals are passed on to all launchers; where one ends with an error, or cannot
/// be reached, the others are told to end too. Call it from the main thread, as `launch`. Errors: ConfigError
/// if there is no ssh here; IoError.
LaunchResult launch_on_hosts(const HostsJob& job, const Logger& log);

}  // namespace tessera::launching
