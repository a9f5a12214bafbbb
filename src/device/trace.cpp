#include "tessera/device/trace.hpp"

#include <algorithm>

#include "tessera/base/clock.hpp"

namespace tessera {

std::string_view name_of(WorkKind kind) {
  switch (kind) {
    case WorkKind::gemm:
      return "GEMM";
    case WorkKind::attention:
      return "attention";
    case WorkKind::elementwise:
      return "element-wise";
    case WorkKind::optimizer:
      return "optimizer";
    case WorkKind::communication:
      return "communication";
    case WorkKind::data:
      return "data";
    case WorkKind::scope:
      return "scope";
  }
  return "?";
}

Trace::Trace(Stream& stream) : asynchronous_(stream.is_asynchronous()) {
  stream.record(origin_);
  origin_.synchronize();
  origin_s_ = now_s();
}

void Trace::add(const std::string& lane, TimedWork work) {
  const std::lock_guard lock(mutex_);
  auto found =
      std::find_if(beside_.begin(), beside_.end(), [&](const TraceLane& each) { return each.name == lane; });
  if (found == beside_.end()) found = beside_.insert(found, {.name = lane, .overlaps = true});
  found->work.push_back(std::move(work));
}

std::vector<TraceLane> Trace::lanes() const {
  const std::lock_guard lock(mutex_);
  std::vector<TraceLane> all;
  if (asynchronous_) {
    TraceLane& lane = all.emplace_back(TraceLane{.name = "stream"});
    for (const Timed& timed : stream_) {
      timed.end.synchronize();
      lane.work.push_back({timed.work, origin_s_ + Event::seconds_between(origin_, timed.begin),
                           origin_s_ + Event::seconds_between(origin_, timed.end)});
    }
  }
  all.push_back({.name = "host", .work = host_});
  all.insert(all.end(), beside_.begin(), beside_.end());
  for (TraceLane& lane : all) {
    // Work was noted when it ended: turned round, what encloses comes first even where times are equal.
    std::reverse(lane.work.begin(), lane.work.end());
    std::stable_sort(lane.work.begin(), lane.work.end(), [](const TimedWork& a, const TimedWork& b) {
      return a.begin_s != b.begin_s ? a.begin_s < b.begin_s : a.end_s > b.end_s;
    });
  }
  return all;
}

void TraceSpan::begin(Stream& stream, Work work) {
  open_.reset(new Open{stream, stream.trace(), {std::move(work)}, {}});
  if (stream.is_asynchronous()) stream.record(open_->begin);
  open_->work.begin_s = now_s();
}

void TraceSpan::end() {
  open_->work.end_s = now_s();
  Trace& trace = *open_->trace;
  Event end;
  if (open_->stream.is_asynchronous()) open_->stream.record(end);
  const std::lock_guard lock(trace.mutex_);
  if (open_->stream.is_asynchronous()) {
    trace.stream_.push_back({open_->work.work, open_->begin, end});
    open_->work.work.product.reset();  // of one product, though it is in both lanes
  }
  trace.host_.push_back(std::move(open_->work));
}

}  // namespace tessera
