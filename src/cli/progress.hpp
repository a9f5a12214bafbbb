#pragma once
#include <chrono>
#include <string>

#include "tessera/engine/trainer.hpp"

namespace tessera::cli {

/// Shows a run on stderr: a bar that redraws itself on a terminal, a line every few steps elsewhere.
class Progress {
 public:
  Progress(std::int64_t every, bool terminal) : every_(every), terminal_(terminal) {}
  void start(const RunInfo& info);
  void step(const StepRecord& record);
  void evaluation(const StepRecord& record);
  /// A line of its own, above the bar.
  void note(const std::string& text);
  void finish();

 private:
  void draw(const StepRecord& record);
  void clear();

  std::int64_t every_;
  bool terminal_;
  bool drawn_ = false;
  RunInfo info_;
  std::chrono::steady_clock::time_point begin_, last_drawn_;
};

}  // namespace tessera::cli
