#pragma once
/// What a person says about a launch, by flags and in a file, and what becomes of it.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/launch/launch.hpp"

namespace tessera {

/// What is not said is left open. The keys of the native file are the member names, under `launch:`.
struct LaunchSettings {
  std::optional<std::int64_t> num_processes, num_machines, machine_rank;
  std::optional<std::string> main_process_ip;
  std::optional<std::int64_t> main_process_port;
  /// The machines and how many processes each takes, a line "NAME slots=N" for each; `include` or `exclude`
  /// pick among them: "NAME[:SLOT,SLOT...]", several joined by '@'. `export_env`: variables, joined by
  /// commas, that all machines shall have as this one does.
  std::optional<std::string> hostfile, include, exclude, export_env;
  std::optional<std::int64_t> ssh_port;
  std::optional<std::int64_t> max_restarts, threads_per_process;
  std::optional<std::string> log_dir, secret_file;
  std::optional<bool> allow_secret_mode;  ///< a secret_file that others can read is taken
  std::optional<double> grace_s, join_timeout_s, restart_delay_s;
  std::optional<bool> cpu, quiet;
  std::optional<bool> pin_cores;  ///< each worker keeps to its share of the machine's cores
  /// As in an `accelerate config` file: NO, MULTI_CPU, MULTI_GPU, MEGATRON_LM or DEEPSPEED.
  std::optional<std::string> distributed_type;
  /// "NAME=value" for the workers: what an `accelerate config` file says to them.
  std::vector<std::string> environment;
  /// What was asked for and has no effect: one sentence each.
  std::vector<std::string> warnings;

  friend bool operator==(const LaunchSettings&, const LaunchSettings&) = default;
};

/// Reads a native file (`launch:` and below it the keys above) or one that `accelerate config` wrote.
/// Errors: ConfigError, one line per fault: "file:line:column: message".
LaunchSettings read_launch_file(const std::filesystem::path& path);
/// The same from text; `name` stands for the file in messages.
LaunchSettings parse_launch_file(std::string_view text, const std::string& name);

/// What `over` says, else what `under` says.
LaunchSettings overlay(const LaunchSettings& under, const LaunchSettings& over);

/// The program and its surroundings.
struct LaunchProgram {
  std::vector<std::string> command;      ///< PROGRAM or SCRIPT.py, and its arguments
  bool module = false;                   ///< the command is a Python module, run with -m
  std::vector<std::string> environment;  ///< "NAME=value", of this process
  std::string python;      ///< interpreter for scripts; empty = this process if it is one, or python3
  bool no_python = false;  ///< NAME.py is executed itself, as any program
};

/// Whether these settings expect GPUs: an `accelerate config` file or flag that names them, without `cpu`.
bool expects_gpus(const LaunchSettings& settings);

/// Fills in defaults, finds the program, reads the secret.
/// Errors: ConfigError, one line per fault, all at once.
LaunchOptions resolve_launch(const LaunchSettings& settings, const LaunchProgram& program);

/// How to start `argv` on this machine as `processes` workers, quietly: for a program that starts copies of
/// itself. The first word is a path, or a name to be found in PATH.
/// Errors: ConfigError if it cannot be found.
LaunchOptions local_launch(int processes, const LaunchProgram& program, const std::string& log_dir = "");

}  // namespace tessera
