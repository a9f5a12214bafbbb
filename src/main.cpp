#include <unistd.h>

#include "tessera/base/env.hpp"
#include "tessera/cli/cli.hpp"

int main(int argc, char** argv) {
  // libgomp has read its environment by now: what is to be otherwise takes a fresh start.
  if (tessera::set_thread_waits()) execv("/proc/self/exe", argv);
  return tessera::cli_main({argv + 1, argv + argc});
}
