#pragma once
#include <csignal>
#include <utility>
#include <vector>

namespace tessera::cli {

/// Handlers of signals while it lives, on a stack of their own: while oneDNN's sgemm runs, the stack pointer
/// may point into the heap (seen with 2.6.3), and a handler's frame there would overwrite other people's
/// memory.
class SignalHandlers {
 public:
  using Handler = void (*)(int);
  explicit SignalHandlers(const std::vector<std::pair<int, Handler>>& handlers);
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;
  /// At its end the signals are ignored instead of given back: in a rank that has done its part, and whose
  /// launcher may only just be asking the ranks one by one to end.
  void ignore_late_ones() { late_ones_ignored_ = true; }

 private:
  bool late_ones_ignored_ = false;
  std::vector<char> stack_;
  stack_t old_stack_{};
  std::vector<std::pair<int, struct sigaction>> old_;
};

}  // namespace tessera::cli
