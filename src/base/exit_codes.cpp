#include "tessera/base/exit_codes.hpp"

#include <unistd.h>

#include <array>

namespace tessera::exit_code {

namespace {

constexpr std::array kTable{
    Row{kDone, "done, or nothing to do"},
    Row{kFailed, "failed: an error of no other kind, such as an exception of a Python script"},
    Row{kUsage, "arguments or a configuration that cannot be used"},
    Row{kSystem, "the system refused: disk, memory"},
    Row{kData, "data or a checkpoint that cannot be used"},
    Row{kLostPeer, "another process was lost, and nobody knows why"},
    Row{kTraining, "the training went wrong: too many steps in a row without a finite gradient"},
    Row{kNoAnswer, "a process gave no answer within the deadline: it hangs, or is stopped"},
    Row{kNoProgress, "restarted three times without getting any further"},
    Row{kPreempted, "preempted: asked to end by SIGTERM or SIGUSR1, saved and ended; start it again"},
    Row{kNoPermission, "the program cannot be executed"},
    Row{kNotFound, "the program was not found"},
    Row{kSignal, "plus N: killed by signal N, or interrupted by it (130: Ctrl-C)"},
};

}  // namespace

std::span<const Row> table() { return kTable; }

void say(const std::string& line) {
  const std::string text = line + "\n";
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t wrote = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (wrote <= 0) return;
    done += static_cast<std::size_t>(wrote);
  }
}

void end_hung(const std::string& line) {
  say(line);
  ::_exit(kNoAnswer);
}

}  // namespace tessera::exit_code
