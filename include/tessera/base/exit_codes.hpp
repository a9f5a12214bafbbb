#pragma once
/// How a job ends, as a number that scripts and schedulers can act on. The table in
/// docs/guides/several_processes.md is this one.

#include <span>
#include <string>

namespace tessera::exit_code {

constexpr int kDone = 0;
constexpr int kFailed = 1;                           ///< an error without a code of its own
constexpr int kUsage = 2;                            ///< InvalidArgument, ConfigError
constexpr int kSystem = 3;                           ///< IoError, memory
constexpr int kData = 4;                             ///< DataError, CheckpointError
constexpr int kLostPeer = 5;                         ///< CommunicationError
constexpr int kTraining = 6;                         ///< TrainingError
constexpr int kNoAnswer = 7;                         ///< CommunicationTimeout, or a process that is stopped
constexpr int kNoProgress = 8;                       ///< restarts that came to nothing
constexpr int kPreempted = 75;                       ///< sysexits.h's EX_TEMPFAIL: try again later
constexpr int kNoPermission = 126, kNotFound = 127;  ///< as shells have it
constexpr int kSignal = 128;                         ///< plus the signal's number

struct Row {
  int code;
  const char* meaning;
};
/// All of them, in the order of the codes.
std::span<const Row> table();

/// For programs, about a thread that hangs: a line on standard error. Touches nothing that such a thread may
/// hold, so nothing of iostreams or of an interpreter.
void say(const std::string& line);
/// The same, and the process ends at once with kNoAnswer.
[[noreturn]] void end_hung(const std::string& line);

}  // namespace tessera::exit_code
