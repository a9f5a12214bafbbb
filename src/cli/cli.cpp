#include "tessera/cli/cli.hpp"

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "cli/commands.hpp"
#include "tessera/base/exit_codes.hpp"
#include "tessera/base/version.hpp"
#include "tessera/comm/timeout.hpp"

namespace tessera {
namespace {

int fail(int code, const std::string& message) {
  std::cerr << "error: " << message << std::endl;
  return code;
}

/// The file this process runs, wherever it was called from.
std::vector<std::string> own_file() {
  std::error_code unknown;
  const std::string file = std::filesystem::read_symlink("/proc/self/exe", unknown).string();
  return {unknown ? "tessera" : file};
}

int run(std::vector<std::string> args, const std::vector<std::string>& self) {
  cli::Program program{read_environment(), Logger::silent(), self.empty() ? own_file() : self, args, 0};
  LogOptions log;
  log.level = program.environment.log_level.value_or(LogLevel::info);
  log.no_color = program.environment.no_color;
  program.log = Logger(log);
  for (const std::string& warning : program.environment.warnings) program.log.warning(warning);

  CLI::App app{"Tessera trains transformers.", "tessera"};
  app.set_version_flag("--version", std::string("tessera ") + version());
  app.require_subcommand(1);
  cli::add_train(app, program);
  cli::add_plan(app, program);
  cli::add_tune(app, program);
  cli::add_launch(app, program);
  cli::add_test(app, program);
  cli::add_preprocess(app, program);
  cli::add_generate(app, program);
  cli::add_evaluate(app, program);
  cli::add_serve(app, program);
  cli::add_convert(app, program);
  cli::add_checkpoint(app, program);
  cli::add_python_commands(app, program);
  cli::add_data(app, program);
  cli::add_env(app, program);
  cli::add_flight(app, program);
  std::reverse(args.begin(), args.end());  // CLI11 takes them from the back
  try {
    app.parse(args);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? exit_code::kDone : exit_code::kUsage;
  }
  return program.exit_code;
}

}  // namespace

int cli_main(const std::vector<std::string>& args, const std::vector<std::string>& self) {
  try {
    return run(args, self);
  } catch (const ConfigError& error) {
    return fail(exit_code::kUsage, error.what());
  } catch (const InvalidArgument& error) {
    return fail(exit_code::kUsage, error.what());
  } catch (const DataError& error) {
    return fail(exit_code::kData, error.what());
  } catch (const CheckpointError& error) {
    return fail(exit_code::kData, error.what());
  } catch (const IoError& error) {
    return fail(exit_code::kSystem, error.what());
  } catch (const CommunicationTimeout& error) {
    return fail(exit_code::kNoAnswer, error.what());
  } catch (const CommunicationError& error) {
    return fail(exit_code::kLostPeer, error.what());
  } catch (const TrainingError& error) {
    return fail(exit_code::kTraining, error.what());
  } catch (const std::bad_alloc&) {
    return fail(exit_code::kSystem, "out of memory");
  } catch (const std::exception& error) {
    return fail(exit_code::kFailed, error.what());
  }
}

}  // namespace tessera
