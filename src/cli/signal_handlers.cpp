#include "cli/signal_handlers.hpp"

namespace tessera::cli {

SignalHandlers::SignalHandlers(const std::vector<std::pair<int, Handler>>& handlers)
    : stack_(std::size_t{1} << 16) {
  stack_t own{};
  own.ss_sp = stack_.data();
  own.ss_size = stack_.size();
  sigaltstack(&own, &old_stack_);
  struct sigaction action {};
  action.sa_flags = SA_ONSTACK | SA_RESTART;
  for (const auto& [signal_number, handler] : handlers) {
    action.sa_handler = handler;
    old_.emplace_back();
    old_.back().first = signal_number;
    sigaction(signal_number, &action, &old_.back().second);
  }
}

SignalHandlers::~SignalHandlers() {
  for (auto& [signal_number, action] : old_) {
    if (late_ones_ignored_) action.sa_handler = SIG_IGN;
    sigaction(signal_number, &action, nullptr);
  }
  sigaltstack(&old_stack_, nullptr);
}

}  // namespace tessera::cli
