#include "launch/command.hpp"

#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "launch/environment.hpp"
#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

namespace fs = std::filesystem;

bool is_file(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool is_executable(const std::string& path) { return is_file(path) && ::access(path.c_str(), X_OK) == 0; }

/// The first executable of that name in PATH; empty if there is none.
std::string in_path(const std::string& name, const Variables& environment) {
  const std::string path = value_of(environment, "PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    if (is_executable(candidate)) return candidate;
    begin = end + 1;
  }
  return {};
}

/// The file this process runs.
std::string own_file() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).string();
}

bool is_python(const std::string& path) { return fs::path(path).filename().string().starts_with("python"); }

std::string find_executable(const std::string& name, const Variables& environment) {
  if (name.find('/') == std::string::npos) {
    const std::string found = in_path(name, environment);
    TESSERA_ENSURE(ConfigError, !found.empty(), "program '", name, "' is not in PATH",
                   is_file(name) ? detail::concat("; for the file in this folder write ./", name) : "");
    return found;
  }
  std::error_code error;
  TESSERA_ENSURE(ConfigError, fs::exists(name, error), "program '", name, "' does not exist");
  TESSERA_ENSURE(ConfigError, is_file(name), "program '", name, "' is not a file");
  TESSERA_ENSURE(ConfigError, is_executable(name), "program '", name, "' is not executable (chmod +x)");
  return name;
}

/// The interpreter for scripts: the one that was named, the one this process is, or python3.
std::string interpreter(const LaunchProgram& program) {
  if (program.python.empty() && is_python(own_file())) return own_file();
  const std::string name = program.python.empty() ? "python3" : program.python;
  try {
    return find_executable(name, program.environment);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat("the Python interpreter for the script: ", error.what(),
                                     "; name another one in TESSERA_PYTHON"));
  }
}

}  // namespace

Command find_command(const LaunchProgram& program) {
  TESSERA_ENSURE(ConfigError, !program.command.empty() && !program.command.front().empty(),
                 "there is no program to start: tessera launch [flags] PROGRAM|SCRIPT.py [args]");
  const std::string& name = program.command.front();
  Command command;
  command.argv = program.command;
  TESSERA_ENSURE(ConfigError, !(program.module && program.no_python),
                 "--module and --no_python contradict each other; give one");
  command.python = program.module || (name.ends_with(".py") && !program.no_python);
  if (command.python) {
    std::error_code error;
    TESSERA_ENSURE(ConfigError, program.module || is_file(name), "script '", name, "' ",
                   fs::exists(name, error) ? "is not a file" : "does not exist");
    command.path = interpreter(program);
    if (program.module) command.argv.insert(command.argv.begin(), "-m");
    command.argv.insert(command.argv.begin(), command.path);
  } else {
    command.path = find_executable(name, program.environment);
  }
  return command;
}

}  // namespace tessera::launching
