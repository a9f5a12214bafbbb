#include "tessera/launch/launch.hpp"

#include <unistd.h>

#include <iostream>
#include <memory>

#include "base/suggest.hpp"
#include "cli/commands.hpp"
#include "tessera/launch/settings.hpp"

namespace tessera::cli {
namespace {

struct LaunchArguments {
  LaunchSettings flags;
  std::string config_file;
  bool cpu = false, quiet = false, module = false;
};

/// A flag before the program that is none of ours.
[[noreturn]] void refuse_flag(const std::string& flag, const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  const std::vector<std::string_view> known(names.begin(), names.end());
  throw ConfigError("unknown flag '" + flag + "' before the program" + suggest(flag, known) +
                    " (flags after the program belong to it)");
}

void run_launch(LaunchArguments arguments, const CLI::App& app, Program& program) {
  const std::vector<std::string> command = app.remaining();
  if (!command.empty() && command.front().starts_with('-')) refuse_flag(command.front(), app);
  if (arguments.cpu) arguments.flags.cpu = true;
  if (arguments.quiet) arguments.flags.quiet = true;
  LaunchSettings settings = arguments.flags;
  if (!arguments.config_file.empty()) settings = overlay(read_launch_file(arguments.config_file), settings);
  const LaunchProgram what{command, arguments.module, inherited_environment(),
                           program.environment.python.value_or("")};
  const LaunchOptions options = resolve_launch(settings, what);
  std::cout << std::flush;
  const LaunchResult result = launch(options, program.log);
  program.exit_code = result.exit_code;
  if (!result.report.empty()) std::cerr << "error: " << result.report << std::endl;
}

/// Accelerate takes its flags with '_' or '-'.
std::string both(const std::string& name) {
  std::string dashes = name;
  for (char& c : dashes) c = c == '_' ? '-' : c;
  return dashes == name ? "--" + name : "--" + name + ",--" + dashes;
}

}  // namespace

std::vector<std::string> inherited_environment() {
  std::vector<std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) variables.emplace_back(*entry);
  return variables;
}

void add_launch(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "launch",
      "Start a program as several processes that train together: launch [flags] PROGRAM|SCRIPT.py [args]");
  command->prefix_command();
  auto arguments = std::make_shared<LaunchArguments>();
  LaunchSettings& flags = arguments->flags;
  const auto add = [command](const std::string& name, auto& value, const std::string& text) {
    command->add_option(both(name), value, text);
  };
  add("num_processes", flags.num_processes, "processes on all machines together (1)");
  add("num_machines", flags.num_machines, "machines, each with a launcher of its own (1)");
  add("machine_rank", flags.machine_rank, "which of them this is, from 0");
  add("main_process_ip", flags.main_process_ip, "address of machine 0 that all can reach");
  add("main_process_port", flags.main_process_port,
      "port there; 0 = a free one, for one machine (29500 for several)");
  add("max_restarts", flags.max_restarts, "after a failure start everything again, so many times (0)");
  add("log_dir", flags.log_dir, "folder for what each rank writes: rank-0.log, rank-1.log, ...");
  add("threads_per_process", flags.threads_per_process, "CPU threads per process (the cores shared out)");
  add("num_cpu_threads_per_process", flags.threads_per_process, "the same");
  add("grace_s", flags.grace_s, "seconds to end in after SIGINT or SIGTERM before the kill (15)");
  add("join_timeout_s", flags.join_timeout_s,
      "seconds to wait for the launchers of the other machines (300)");
  add("secret_file", flags.secret_file, "file with the text that all machines of the job share");
  add("config_file", arguments->config_file,
      "YAML file of `accelerate config`, or one with a section 'launch'");
  command->add_flag("--cpu", arguments->cpu, "use no GPU");
  command->add_flag("-q,--quiet", arguments->quiet, "show the output of rank 0 only, as it comes");
  command->add_flag("-m,--module", arguments->module, "PROGRAM is a Python module, as in python -m");
  command->callback([arguments, command, &program] { run_launch(*arguments, *command, program); });
}

}  // namespace tessera::cli
