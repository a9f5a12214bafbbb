#include "cli/progress.hpp"

#include <algorithm>
#include <cstdio>
#include <iostream>

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

std::string clock_time(double seconds) {
  const auto total = static_cast<long>(seconds + 0.5);
  char text[32];
  if (total >= 3600) {
    std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", total / 3600, total / 60 % 60, total % 60);
  } else {
    std::snprintf(text, sizeof text, "%ld:%02ld", total / 60, total % 60);
  }
  return text;
}

std::string short_count(double n) {
  char text[32];
  if (n >= 1e9) {
    std::snprintf(text, sizeof text, "%.2fB", n / 1e9);
  } else if (n >= 1e6) {
    std::snprintf(text, sizeof text, "%.1fM", n / 1e6);
  } else if (n >= 1e4) {
    std::snprintf(text, sizeof text, "%.1fk", n / 1e3);
  } else {
    std::snprintf(text, sizeof text, "%.0f", n);
  }
  return text;
}

/// " (token 6.1234, nsp 0.6931)" of a model with several losses.
std::string parts_text(const std::vector<std::pair<std::string, double>>& losses) {
  std::string text;
  for (const auto& [name, value] : losses) {
    char part[32];
    std::snprintf(part, sizeof part, " %.4f", value);
    text += (text.empty() ? " (" : ", ") + name + part;
  }
  return text.empty() ? text : text + ")";
}

}  // namespace

void Progress::start(const RunInfo& info) {
  info_ = info;
  begin_ = last_drawn_ = Clock::now();
  std::string line = short_count(static_cast<double>(info.parameters)) + " parameters, steps " +
                     std::to_string(info.first_step + 1) + " to " + std::to_string(info.steps) + " of " +
                     short_count(static_cast<double>(info.tokens_per_step)) + " tokens, " +
                     std::to_string(info.threads) + " threads";
  if (info.gemm_flops_per_s)
    line += ", matrix products at " + short_count(*info.gemm_flops_per_s / 1e9) + " GFLOP/s";
  note(line);
}

void Progress::step(const StepRecord& record) {
  const bool last = record.step == info_.steps;
  const bool line_due = !terminal_ && (record.step % std::max<std::int64_t>(every_, 1) == 0 || last);
  const bool bar_due = terminal_ && (last || Clock::now() - last_drawn_ > std::chrono::milliseconds(100));
  if (line_due || bar_due) draw(record);
}

void Progress::draw(const StepRecord& record) {
  const double elapsed = std::chrono::duration<double>(Clock::now() - begin_).count();
  const auto done = static_cast<double>(record.step - info_.first_step);
  const double left = elapsed / done * static_cast<double>(info_.steps - record.step);
  char text[256];
  std::snprintf(text, sizeof text, "step %lld/%lld  loss %.4f%s  grad %.3f  lr %.2e  %s tok/s  left %s",
                static_cast<long long>(record.step), static_cast<long long>(info_.steps), record.loss,
                parts_text(record.losses).c_str(), record.grad_norm, record.lr,
                short_count(record.tokens_per_s).c_str(), clock_time(left).c_str());
  std::string line = text;
  if (terminal_) {
    constexpr int kWidth = 24;
    const int filled = static_cast<int>(kWidth * record.step / std::max<std::int64_t>(info_.steps, 1));
    line = "[" + std::string(static_cast<std::size_t>(filled), '#') +
           std::string(static_cast<std::size_t>(kWidth - filled), '.') + "] " + line;
    clear();
    std::cerr << line << std::flush;
    drawn_ = true;
    last_drawn_ = Clock::now();
  } else {
    std::cerr << line << std::endl;
  }
}

void Progress::evaluation(const StepRecord& record) {
  char text[96];
  std::snprintf(text, sizeof text, "step %lld  validation loss %.4f", static_cast<long long>(record.step),
                record.eval_loss.value_or(0));
  note(text + parts_text(record.eval_losses));
}

void Progress::note(const std::string& text) {
  clear();
  std::cerr << text << std::endl;
}

void Progress::clear() {
  if (drawn_) std::cerr << "\r\033[K";
  drawn_ = false;
}

void Progress::finish() {
  if (drawn_) std::cerr << std::endl;
  drawn_ = false;
}

}  // namespace tessera::cli
