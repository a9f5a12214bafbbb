#pragma once
/// How far a process has come, for its launcher: whether restarts get anywhere, and how long a save takes.

#include <cstdint>

#include "tessera/base/env.hpp"

namespace tessera {

/// Writes to the launcher's pipe (TESSERA_PROGRESS); does nothing where there is none. Never waits: what the
/// launcher does not take in time is dropped.
class ProgressReporter {
 public:
  explicit ProgressReporter(const Environment& environment);
  /// Step `step` of the run, counted from 1, was made.
  void step(std::int64_t step) const noexcept;
  /// A checkpoint of that step is whole; writing it took so many seconds.
  void saved(std::int64_t step, double seconds) const noexcept;

 private:
  int pipe_ = -1;  // the process's own, as stderr is
};

}  // namespace tessera
