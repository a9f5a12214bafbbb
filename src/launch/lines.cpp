#include "launch/lines.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace tessera::launching {
namespace {

std::string_view last_state(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  const auto overwritten = line.rfind('\r');
  return overwritten == std::string_view::npos ? line : line.substr(overwritten + 1);
}

}  // namespace

void LineCutter::add(std::string_view bytes, const std::function<void(std::string_view)>& line) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    const std::size_t room = kLongest - partial_.size();
    const std::size_t piece = std::min({end, bytes.size(), room});
    partial_.append(bytes.substr(0, piece));
    bytes.remove_prefix(piece);
    const bool ended = !bytes.empty() && bytes.front() == '\n';
    if (ended) bytes.remove_prefix(1);
    if (ended || partial_.size() == kLongest) {
      line(last_state(partial_));
      partial_.clear();
    }
  }
}

void LineCutter::finish(const std::function<void(std::string_view)>& line) {
  if (!partial_.empty()) line(last_state(partial_));
  partial_.clear();
}

void Tail::follow_traceback(std::string_view line) {
  if (line.find("Traceback (most recent call last):") != std::string_view::npos) {
    if (!traceback_ || !chained_) begin_ = kept_.size() - 1;
    traceback_ = true;
    chained_ = false;
    since_ = 0;
  } else if (traceback_) {
    // Frames and the lines of code below them are indented; the exception itself is not.
    since_ = line.starts_with(' ') ? 0 : since_ + 1;
    chained_ |= line.starts_with("During handling of the above exception") ||
                line.starts_with("The above exception was the direct cause");
    if (since_ > lines_ || kept_.size() - begin_ > kMost) traceback_ = false;
  }
}

void Tail::add(std::string_view line) {
  constexpr std::size_t kLongestKept = 2000;
  kept_.emplace_back(line.substr(0, kLongestKept));
  follow_traceback(kept_.back());
  while (kept_.size() > lines_ && (!traceback_ || begin_ > 0)) {
    kept_.pop_front();
    if (traceback_) --begin_;
  }
}

void Outlet::add(std::string_view bytes) {
  if (!gone_) waiting_.append(bytes);
}

void Outlet::write_some() {
  // A pipe that is ready takes so much at once, and so does a terminal that is not stopped.
  constexpr std::size_t kPiece = 4096;
  if (empty()) return;
  const ssize_t done = ::write(fd_, waiting_.data() + written_, std::min(kPiece, waiting_.size() - written_));
  if (done < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (done < 0) {
    gone_ = true;
    waiting_.clear();
    written_ = 0;
    return;
  }
  written_ += static_cast<std::size_t>(done);
  if (written_ >= kFull || empty()) {
    waiting_.erase(0, written_);
    written_ = 0;
  }
}

void Outlet::flush(double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  while (!empty()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready{fd_, POLLOUT, 0};
    if (left <= 0) return;
    if (::poll(&ready, 1, static_cast<int>(left)) > 0) write_some();
  }
}

}  // namespace tessera::launching
