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

 private:
  std::vector<char> stack_;
  stack_t old_stack_{};
  std::vector<std::pair<int, struct sigaction>> old_;
};

}  // namespace tessera::cli
