#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tessera/base/error.hpp"
#include "tessera/engine/profile.hpp"

namespace tessera {
namespace {

std::string json_string(std::string_view text) { return nlohmann::json(text).dump(); }

/// Writes events; times are rounded to nanoseconds before lengths are taken, so what is nested stays so.
class Events {
 public:
  Events(int rank, double origin_s) : rank_(rank), origin_s_(origin_s) {}

  void name(const char* what, int thread, const std::string& name) {
    begin_event("M", what, thread);
    text_ += ",\"args\":{\"name\":" + json_string(name) + "}}";
  }
  void order(const char* what, int thread, int place) {
    begin_event("M", what, thread);
    text_ += ",\"args\":{\"sort_index\":" + std::to_string(place) + "}}";
  }
  void work(int thread, const TimedWork& timed) {
    begin_event("X", timed.work.name, thread);
    const std::int64_t begin = nanoseconds(timed.begin_s), end = std::max(begin, nanoseconds(timed.end_s));
    text_ += ",\"cat\":" + json_string(name_of(timed.work.kind)) + ",\"ts\":" + microseconds(begin) +
             ",\"dur\":" + microseconds(end - begin);
    if (timed.work.flops > 0 || timed.work.bytes > 0) {
      text_ +=
          ",\"args\":{\"flops\":" + number(timed.work.flops) + ",\"bytes\":" + number(timed.work.bytes) + "}";
    }
    text_ += "}";
  }
  std::string finish() && { return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[" + text_ + "\n]}\n"; }

 private:
  void begin_event(const char* phase, const std::string& name, int thread) {
    text_ += text_.empty() ? "\n" : ",\n";
    text_ += std::string("{\"ph\":\"") + phase + "\",\"name\":" + json_string(name) +
             ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(thread);
  }
  std::int64_t nanoseconds(double s) const { return std::llround((s - origin_s_) * 1e9); }
  static std::string microseconds(std::int64_t ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", static_cast<double>(ns) / 1e3);
    return text;
  }
  static std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", value);
    return text;
  }

  int rank_;
  double origin_s_;
  std::string text_;
};

/// What overlaps without enclosing each other, such as messages under way together, goes side by side.
std::vector<TraceLane> side_by_side(const TraceLane& lane) {
  std::vector<TraceLane> rows;
  for (const TimedWork& work : lane.work) {
    auto row = std::find_if(rows.begin(), rows.end(),
                            [&](const TraceLane& each) { return each.work.back().end_s <= work.begin_s; });
    if (row == rows.end()) {
      row = rows.insert(row, {.name = lane.name});
      if (rows.size() > 1) row->name = detail::concat(lane.name, " ", rows.size());
    }
    row->work.push_back(work);
  }
  return rows;
}

}  // namespace

std::string trace_json(const std::vector<TraceLane>& lanes, std::span<const TimedStep> steps, int rank,
                       double origin_s) {
  std::vector<TraceLane> threads{{"steps", {}}};
  for (const TimedStep& step : steps) {
    threads[0].work.push_back(
        {{WorkKind::scope, "step " + std::to_string(step.step)}, step.begin_s, step.end_s});
  }
  for (const TraceLane& lane : lanes) {
    if (!lane.overlaps) {
      threads.push_back(lane);
    } else {
      for (TraceLane& row : side_by_side(lane)) threads.push_back(std::move(row));
    }
  }
  Events events(rank, origin_s);
  events.name("process_name", 0, "rank " + std::to_string(rank));
  events.order("process_sort_index", 0, rank);
  for (std::size_t i = 0; i < threads.size(); ++i) {
    const int thread = static_cast<int>(i);
    events.name("thread_name", thread, threads[i].name);
    events.order("thread_sort_index", thread, thread);
    for (const TimedWork& work : threads[i].work) events.work(thread, work);
  }
  return std::move(events).finish();
}

}  // namespace tessera
