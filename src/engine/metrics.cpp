#include "tessera/engine/metrics.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "checkpoint/file_io.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

std::string system_error() { return std::strerror(errno); }

/// "step 4", "steps 2 to 3, 7, ...": at most four ranges.
std::string steps_text(const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges) {
  if (ranges.empty()) return "";
  std::string text = ranges.size() == 1 && ranges[0].first == ranges[0].second ? "step " : "steps ";
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (i == 4) return text + ", ...";
    const auto& [first, last] = ranges[i];
    text += detail::concat(i > 0 ? ", " : "", first);
    if (last > first) text += detail::concat(" to ", last);
  }
  return text;
}

/// The step of a whole line, or nothing.
std::optional<std::int64_t> step_of(const std::string& line) {
  const auto record = nlohmann::json::parse(line, nullptr, false);
  if (!record.is_object() || !record.contains("step") || !record["step"].is_number_integer())
    return std::nullopt;
  return record["step"].get<std::int64_t>();
}

/// A metrics file that is read line by line: what to keep of it, and what there is to say about it.
class OldLines {
 public:
  OldLines(const std::filesystem::path& path, std::int64_t last_step) : last_step_(last_step) {
    std::ifstream in(path);
    std::string line;
    for (std::int64_t number = 1; std::getline(in, line); ++number) take(line, number, in.eof());
    if (next_ <= last_step_) missing_.emplace_back(next_, last_step_);
    history_.missing = steps_text(missing_);
    history_.dropped = steps_text(dropped_);
  }
  const std::string& text() const { return text_; }
  const MetricsHistory& history() const { return history_; }

 private:
  void take(const std::string& line, std::int64_t number, bool cut) {
    const auto step = cut ? std::nullopt : step_of(line);
    if (!step) {
      history_.damage += detail::concat(history_.damage.empty() ? "" : ", ", "line ", number,
                                        cut ? " is cut off" : " is not one of metrics");
      return;
    }
    history_.last = std::max(history_.last, *step);
    if (*step > last_step_) {
      if (!dropped_.empty() && dropped_.back().second + 1 == *step)
        ++dropped_.back().second;
      else
        dropped_.emplace_back(*step, *step);
    } else if (*step >= next_) {
      if (*step > next_) missing_.emplace_back(next_, *step - 1);
      next_ = *step + 1;
      ++history_.lines;
      text_ += line + "\n";
    }
  }

  std::int64_t last_step_, next_ = 1;  // next_: the step whose line comes next
  std::vector<std::pair<std::int64_t, std::int64_t>> missing_, dropped_;
  std::string text_;
  MetricsHistory history_;
};

/// metrics.1.jsonl beside metrics.jsonl, or the next that is not there.
std::filesystem::path free_name(const std::filesystem::path& path) {
  for (int number = 1;; ++number) {
    std::filesystem::path name = path;
    name.replace_extension(detail::concat(".", number, path.extension().string()));
    if (!std::filesystem::exists(name)) return name;
  }
}

void write_all(int file, const std::string& text, const std::filesystem::path& path) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(file, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    TESSERA_ENSURE(IoError, n >= 0, "cannot write ", path.string(), ": ", system_error());
    done += static_cast<std::size_t>(n);
  }
}

/// `"key":value` with nine significant digits, enough for any fp32 number.
void append(std::string& line, const char* key, double value) {
  char text[64];
  if (std::isfinite(value)) {
    std::snprintf(text, sizeof text, "%.9g", value);
  } else {
    std::snprintf(text, sizeof text, "null");
  }
  line += line.size() > 1 ? "," : "";
  line += std::string("\"") + key + "\":" + text;
}
void append(std::string& line, const char* key, std::int64_t value) {
  line += line.size() > 1 ? "," : "";
  line += std::string("\"") + key + "\":" + std::to_string(value);
}

}  // namespace

MetricsFile::MetricsFile(std::filesystem::path path, std::int64_t last_step) : path_(std::move(path)) {
  OldLines old(path_, last_step);
  history_ = old.history();
  if (last_step == 0 && history_.last > 0) {
    history_.kept_as = free_name(path_);
    history_.dropped.clear();
    TESSERA_ENSURE(IoError, ::rename(path_.c_str(), history_.kept_as.c_str()) == 0, "cannot rename ",
                   path_.string(), ": ", system_error());
  }
  const std::filesystem::path temporary = path_.string() + ".tmp";
  file_ = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  TESSERA_ENSURE(IoError, file_ >= 0, "cannot open ", temporary.string(), " for writing: ", system_error());
  write_all(file_, old.text(), temporary);
  sync();
  TESSERA_ENSURE(IoError, ::rename(temporary.c_str(), path_.c_str()) == 0, "cannot replace ", path_.string(),
                 ": ", system_error());
  checkpoint_detail::sync_directory(path_.parent_path());
}

void MetricsFile::sync() {
  TESSERA_ENSURE(IoError, ::fdatasync(file_) == 0, "cannot sync ", path_.string(), ": ", system_error());
}

MetricsFile::~MetricsFile() {
  if (file_ >= 0) ::close(file_);
}

void MetricsFile::write(const StepRecord& r) {
  std::string line = "{";
  append(line, "step", r.step);
  append(line, "loss", r.loss);
  append(line, "grad_norm", r.grad_norm);
  append(line, "lr", r.lr);
  append(line, "tokens", r.tokens);
  append(line, "tokens_per_s", r.tokens_per_s);
  append(line, "mfu", r.mfu.value_or(std::nan("")));
  append(line, "mfu_of_measured", r.mfu_of_measured.value_or(std::nan("")));
  append(line, "step_ms", r.step_ms);
  append(line, "data_ms", r.data_ms);
  append(line, "forward_ms", r.forward_ms);
  append(line, "backward_ms", r.backward_ms);
  append(line, "update_ms", r.update_ms);
  append(line, "communication_share", r.communication_share);
  append(line, "peak_mem_bytes", r.peak_mem_bytes);
  append(line, "skipped", r.skipped);
  for (const auto& [name, value] : r.losses) append(line, (name + "_loss").c_str(), value);
  if (r.loss_scale) append(line, "loss_scale", *r.loss_scale);
  if (r.eval_loss) append(line, "eval_loss", *r.eval_loss);
  for (const auto& [name, value] : r.eval_losses) append(line, ("eval_" + name + "_loss").c_str(), value);
  if (r.bubble_ms) append(line, "bubble_ms", *r.bubble_ms);
  for (const StepRecord::Traffic& t : r.traffic) {
    append(line, (t.axis + "_bytes").c_str(), t.bytes);
    append(line, (t.axis + "_wait_ms").c_str(), t.wait_ms);
  }
  write_all(file_, line + "}\n", path_);
}

std::int64_t peak_memory_bytes(const ExecCtx& ctx) {
  if (!ctx.device().is_cpu()) return static_cast<std::int64_t>(ctx.allocator->stats().system_bytes);
  // Not getrusage's ru_maxrss: that of a process which fork and exec made begins with its parent's.
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

}  // namespace tessera
