#pragma once
/// The launcher's end of a ProgressReporter: lines "step N" and "saved N SECONDS".

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::launching {

/// How far one or several processes have come.
struct Progress {
  std::int64_t step = 0;   ///< the last one made; 0 = none is known
  std::int64_t saved = 0;  ///< of the newest checkpoint written; 0 = none is known
  double step_s = 0;       ///< the longest time between two steps
  double save_s = 0;       ///< what the last save took

  /// The furthest of both.
  void join(const Progress& other);
  friend bool operator==(const Progress&, const Progress&) = default;
};

/// Puts what is read from the pipe together; what means nothing is passed over.
class ProgressReader {
 public:
  /// `now_s`: of tessera::now_s().
  void add(std::string_view bytes, double now_s);
  const Progress& progress() const { return progress_; }

 private:
  void take(std::string_view line, double now_s);

  std::string rest_;
  Progress progress_;
  double last_step_s_ = 0;  // when the last step was told; 0 = there is none to count from
};

}  // namespace tessera::launching
