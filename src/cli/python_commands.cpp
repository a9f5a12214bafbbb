#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>

#include "cli/commands.hpp"

namespace tessera::cli {
namespace {

/// Runs `python -m tessera COMMAND ARGS...` in a child and returns its exit code.
int run_python(const std::string& python, const std::string& name,
               const std::vector<std::string>& arguments) {
  std::vector<std::string> words{python, "-m", "tessera", name};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  TESSERA_ENSURE(IoError, child >= 0, "cannot start a process: ", std::strerror(errno));
  if (child == 0) {
    execvp(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

void add_python_commands(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand("plot", "Draw a run's loss curve to loss.png (Python, matplotlib)");
  command->prefix_command();
  command->callback([command, &program] {
    const std::string python = program.environment.python.value_or("python3");
    program.exit_code = run_python(python, "plot", command->remaining());
    TESSERA_ENSURE(ConfigError, program.exit_code != 127, "`tessera plot` needs ", python,
                   ", which cannot be run. Install Python, or name one in TESSERA_PYTHON");
    if (program.exit_code != 0) {
      std::cerr << "`tessera plot` runs `" << python
                << " -m tessera plot`: if it did not find the package, install it there with pip install "
                   "'.[plot]' in "
                   "Tessera's source folder"
                << std::endl;
    }
  });
}

}  // namespace tessera::cli
