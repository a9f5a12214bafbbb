#pragma once
/// What workers write: cut into lines, kept for the report, passed on without mixing.

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launching {

/// Cuts a stream into lines. A line ends at '\n' (a '\r' before it belongs to the end); one that is longer
/// than kLongest is cut. Of a line that was overwritten with '\r', as progress bars do, the last state
/// counts.
class LineCutter {
 public:
  static constexpr std::size_t kLongest = std::size_t{1} << 16;

  /// Calls `line` with every finished line, without its end.
  void add(std::string_view bytes, const std::function<void(std::string_view)>& line);
  /// The end of the stream: what has no line end yet is a line too.
  void finish(const std::function<void(std::string_view)>& line);

 private:
  std::string partial_;
};

/// The last lines of a stream or two. A Python traceback among them is kept whole, with those it is chained
/// to, as long as it is one of the last things said.
class Tail {
 public:
  explicit Tail(std::size_t lines) : lines_(lines) {}
  void add(std::string_view line);
  std::vector<std::string> lines() const { return {kept_.begin(), kept_.end()}; }

 private:
  static constexpr std::size_t kMost = 1000;  ///< lines of a traceback

  void follow_traceback(std::string_view line);

  std::size_t lines_;
  std::deque<std::string> kept_;
  bool traceback_ = false;
  std::size_t begin_ = 0;  ///< where it begins in kept_
  std::size_t since_ = 0;  ///< lines since its frames
  bool chained_ = false;   ///< the next one belongs to it
};

/// Output to one descriptor that never makes the launcher wait: bytes are kept until the other side takes
/// them.
class Outlet {
 public:
  explicit Outlet(int fd) : fd_(fd) {}

  void add(std::string_view bytes);
  /// Workers should not be read from until the other side has caught up.
  bool full() const { return waiting_.size() - written_ >= kFull; }
  bool empty() const { return waiting_.size() == written_; }
  int fd() const { return fd_; }
  /// Writes a piece that fits for certain; call when the descriptor is ready.
  void write_some();
  /// Writes all, waiting at most so long for the other side.
  void flush(double timeout_s);

 private:
  static constexpr std::size_t kFull = std::size_t{1} << 20;

  int fd_;
  bool gone_ = false;  ///< the other side hung up; what is written now is lost
  std::string waiting_;
  std::size_t written_ = 0;
};

}  // namespace tessera::launching
