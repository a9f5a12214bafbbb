#pragma once
/// One function per subcommand: declares its options on the CLI11 app and sets what runs it.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "tessera/base/env.hpp"
#include "tessera/base/log.hpp"
#include "tessera/launch/launch.hpp"

namespace tessera::cli {

/// What every command gets, and the exit code it leaves.
struct Program {
  Environment environment;
  Logger log;
  std::vector<std::string> self;       ///< what starts this program again
  std::vector<std::string> arguments;  ///< as they were given, the command's name first
  int exit_code = 0;
};

/// `command`, with `tessera` in its first place standing for this very program, in PATH or not.
std::vector<std::string> with_self(std::vector<std::string> command, const Program& program);
/// What a launched job ended with, for the last lines on the terminal.
void print_report(const LaunchResult& result);

/// This process's environment as "NAME=value", to be handed on to workers unread.
std::vector<std::string> inherited_environment();

void add_train(CLI::App& app, Program& program);
void add_plan(CLI::App& app, Program& program);
void add_tune(CLI::App& app, Program& program);
void add_launch(CLI::App& app, Program& program);
void add_test(CLI::App& app, Program& program);
void add_preprocess(CLI::App& app, Program& program);
void add_generate(CLI::App& app, Program& program);
void add_evaluate(CLI::App& app, Program& program);
void add_serve(CLI::App& app, Program& program);
void add_convert(CLI::App& app, Program& program);
void add_checkpoint(CLI::App& app, Program& program);
void add_data(CLI::App& app, Program& program);
void add_env(CLI::App& app, Program& program);
/// Prints the rates of memory, of GPUs' links to it, and of a disk in the folder `disk` (empty: none).
void measure_rates(const std::string& disk);
void add_flight(CLI::App& app, Program& program);
/// Runs `python -m tessera COMMAND ARGS...` in a child that imports nothing from the current folder, and
/// returns its exit code, 127 if it cannot be run. `quiet`: without what it says on stderr.
int run_python(const std::string& python, const std::string& name, const std::vector<std::string>& arguments,
               bool quiet = false);
/// Commands that are Python modules: run through `python3 -m tessera`.
void add_python_commands(CLI::App& app, Program& program);

}  // namespace tessera::cli
