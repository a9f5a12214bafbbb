#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>

#include "base/python_module.hpp"
#include "cli/commands.hpp"

namespace tessera::cli {

int run_python(const std::string& python, const std::string& name, const std::vector<std::string>& arguments,
               bool quiet) {
  std::vector<std::string> words = python_module(python, "tessera");
  words.push_back(name);
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  TESSERA_ENSURE(IoError, child >= 0, "cannot start a process: ", std::strerror(errno));
  if (child == 0) {
    if (quiet) dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

namespace {

/// One command of the package: `needs` is the optional part of it that it takes, as pip has it.
void add_python_command(CLI::App& app, Program& program, const std::string& name, const std::string& text,
                        const std::string& needs) {
  auto* command = app.add_subcommand(name, text);
  command->prefix_command();
  // Its flags, and its help, are the module's.
  command->set_help_flag();
  command->callback([command, name, needs, &program] {
    const std::string python = program.environment.python.value_or("python3");
    std::cout << std::flush;
    program.exit_code = run_python(python, name, command->remaining());
    TESSERA_ENSURE(ConfigError, program.exit_code != 127, "`tessera ", name, "` needs ", python,
                   ", which cannot be run. Install Python, or name one in TESSERA_PYTHON");
    if (program.exit_code == 1) {
      std::cerr << "`tessera " << name << "` runs `" << python << " -m tessera " << name
                << "`: if it did not find the package, install it there with pip install '." << needs
                << "' in Tessera's source folder" << std::endl;
    }
  });
}

}  // namespace

void add_python_commands(CLI::App& app, Program& program) {
  add_python_command(app, program, "plot", "Draw a run's loss curve to loss.png (Python, matplotlib)",
                     "[plot]");
  add_python_command(app, program, "config", "Write the file that `tessera launch` starts jobs with (Python)",
                     "");
}

}  // namespace tessera::cli
