#include "launch/progress.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>

#include "tessera/launch/progress.hpp"

namespace tessera {

ProgressReporter::ProgressReporter(const Environment& environment) {
  // Somebody may have closed the pipe on the way, and opened something else under its number.
  struct stat found {};
  if (environment.progress_fd < 0 || fstat(environment.progress_fd, &found) != 0) return;
  if (!S_ISFIFO(found.st_mode) || found.st_ino != environment.progress_inode) return;
  pipe_ = environment.progress_fd;
  fcntl(pipe_, F_SETFL, O_NONBLOCK);
  fcntl(pipe_, F_SETFD, FD_CLOEXEC);  // programs that this process starts are no ranks
}

namespace {

void send(int pipe, const std::array<char, 64>& line, int length) {
  if (pipe < 0 || length <= 0) return;
  // A launcher that is gone has killed this process too; one that is busy hears of the next step.
  [[maybe_unused]] const ssize_t written = write(pipe, line.data(), static_cast<std::size_t>(length));
}

}  // namespace

void ProgressReporter::step(std::int64_t step) const noexcept {
  std::array<char, 64> line{};
  send(pipe_, line, std::snprintf(line.data(), line.size(), "step %lld\n", static_cast<long long>(step)));
}

void ProgressReporter::saved(std::int64_t step, double seconds) const noexcept {
  std::array<char, 64> line{};
  send(pipe_, line,
       std::snprintf(line.data(), line.size(), "saved %lld %lld\n", static_cast<long long>(step),
                     static_cast<long long>(seconds * 1e3)));
}

namespace launching {

void Progress::join(const Progress& other) {
  step = std::max(step, other.step);
  saved = std::max(saved, other.saved);
  step_s = std::max(step_s, other.step_s);
  save_s = std::max(save_s, other.save_s);
}

void ProgressReader::add(std::string_view bytes, double now_s) {
  constexpr std::size_t kLongest = 256;
  rest_ += bytes;
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = rest_.find('\n', begin)) != std::string::npos; begin = end + 1)
    take(std::string_view(rest_).substr(begin, end - begin), now_s);
  rest_.erase(0, rest_.size() - begin > kLongest ? rest_.size() : begin);
}

void ProgressReader::take(std::string_view line, double now_s) {
  const auto number = [&line](std::int64_t& value) {
    const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    line.remove_prefix(static_cast<std::size_t>(stop - line.data()));
    if (line.starts_with(' ')) line.remove_prefix(1);
    return error == std::errc() && value >= 0;
  };
  const bool saved = line.starts_with("saved ");
  if (!saved && !line.starts_with("step ")) return;
  line.remove_prefix(saved ? 6 : 5);
  std::int64_t step = 0, milliseconds = 0;
  if (!number(step) || (saved && !number(milliseconds)) || !line.empty()) return;
  if (saved) {
    progress_.saved = std::max(progress_.saved, step);
    progress_.save_s = static_cast<double>(milliseconds) / 1e3;
    last_step_s_ = 0;  // the time of the save is no step's
    return;
  }
  progress_.step = std::max(progress_.step, step);
  if (last_step_s_ > 0) progress_.step_s = std::max(progress_.step_s, now_s - last_step_s_);
  last_step_s_ = now_s;
}

}  // namespace launching
}  // namespace tessera
