#pragma once
#include <string>
#include <vector>

#include "tessera/launch/settings.hpp"

namespace tessera::launching {

/// What to execute for a command: a file and its argument list.
struct Command {
  std::string path;
  std::vector<std::string> argv;
  bool python = false;  ///< an interpreter runs a script or module
};

/// "tessera" is this program, NAME.py goes to the interpreter, everything else is looked up as a shell does.
/// Errors: ConfigError that says what is missing.
Command find_command(const LaunchProgram& program);

}  // namespace tessera::launching
