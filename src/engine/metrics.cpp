#include "tessera/engine/metrics.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

std::string system_error() { return std::strerror(errno); }

/// The lines to keep: whole ones, each step once, none after last_step.
std::string kept_lines(const std::filesystem::path& path, std::int64_t last_step) {
  std::ifstream in(path);
  std::string text, line;
  while (std::getline(in, line)) {
    if (in.eof()) break;  // no newline: the writer died in the middle of it
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (record.is_object() && record.contains("step") && record["step"].is_number_integer() &&
        record["step"].get<std::int64_t>() <= last_step) {
      text += line + "\n";
    }
  }
  return text;
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
  const std::string keep = std::filesystem::exists(path_) ? kept_lines(path_, last_step) : "";
  const std::filesystem::path temporary = path_.string() + ".tmp";
  file_ = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  TESSERA_ENSURE(IoError, file_ >= 0, "cannot open ", temporary.string(), " for writing: ", system_error());
  write_all(file_, keep, temporary);
  TESSERA_ENSURE(IoError, ::rename(temporary.c_str(), path_.c_str()) == 0, "cannot replace ", path_.string(),
                 ": ", system_error());
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
  append(line, "step_ms", r.step_ms);
  append(line, "data_ms", r.data_ms);
  append(line, "forward_ms", r.forward_ms);
  append(line, "backward_ms", r.backward_ms);
  append(line, "update_ms", r.update_ms);
  append(line, "peak_mem_bytes", r.peak_mem_bytes);
  append(line, "skipped", r.skipped);
  if (r.loss_scale) append(line, "loss_scale", *r.loss_scale);
  if (r.eval_loss) append(line, "eval_loss", *r.eval_loss);
  if (r.bubble_ms) append(line, "bubble_ms", *r.bubble_ms);
  for (const StepRecord::Traffic& t : r.traffic) {
    append(line, (t.axis + "_bytes").c_str(), t.bytes);
    append(line, (t.axis + "_wait_ms").c_str(), t.wait_ms);
  }
  write_all(file_, line + "}\n", path_);
}

std::int64_t peak_memory_bytes(const ExecCtx& ctx) {
  if (!ctx.device().is_cpu()) return static_cast<std::int64_t>(ctx.allocator->stats().system_bytes);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace tessera
