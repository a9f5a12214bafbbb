#pragma once
/// How long stretches of a stream's work take.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/device/stream.hpp"
#include "tessera/ops/backends.hpp"
#include "tessera/tensor/host_copy.hpp"

namespace tessera {

/// Points in a CUDA stream's work whose times are written to the device's memory. A graph writes them at
/// every launch, and a copy behind the launch tells them: an event of the graph would be the next launch's
/// before anybody has read it.
class DeviceClock {
 public:
  /// `times`: i64, room for as many as will be marked. `ctx` outlives it.
  DeviceClock(const ExecCtx& ctx, Tensor times) : ctx_(ctx), times_(std::move(times)) {}
  /// The number of a point here.
  std::int64_t mark() {
    ops::write_time(ctx_, times_.narrow(0, marks_, 1));
    return marks_++;
  }
  /// Nanoseconds, by number.
  HostCopy read() const { return HostCopy(ctx_, times_.narrow(0, 0, marks_)); }

 private:
  const ExecCtx& ctx_;
  Tensor times_;
  std::int64_t marks_ = 0;
};

/// Stretches of a stream's work, timed where it runs.
class Spans {
 public:
  explicit Spans(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

  /// Spans that begin from here on are timed by `clock`, and their times are read by of_launch().
  void set_clock(std::shared_ptr<DeviceClock> clock) { clock_ = std::move(clock); }
  const std::shared_ptr<DeviceClock>& clock() const { return clock_; }
  /// The same spans with the times of one launch: DeviceClock::read(), copied after it.
  Spans of_launch(HostCopy times) const {
    Spans spans(stream_);
    spans.list_ = list_;
    spans.marks_ = marks_;
    spans.times_ = std::move(times);
    return spans;
  }

  /// From its construction to its end of life.
  class Span {
   public:
    explicit Span(Spans& spans) : spans_(spans) {
      if (spans_.clock_) {
        mark_ = spans_.clock_->mark();
      } else {
        spans_.stream_->record_time(begin_);
      }
    }
    ~Span() {
      if (std::uncaught_exceptions() > thrown_) return;  // nobody will ask, and the device may have failed
      if (spans_.clock_) {
        spans_.marks_.emplace_back(mark_, spans_.clock_->mark());
        return;
      }
      Event end;
      spans_.stream_->record_time(end);
      spans_.list_.emplace_back(begin_, end);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    Spans& spans_;
    Event begin_;
    std::int64_t mark_ = 0;
    int thrown_ = std::uncaught_exceptions();
  };

  /// Of all spans together. Waits until their work is done.
  double seconds() const {
    double sum = 0;
    for (const auto& [begin, end] : list_) {
      end.synchronize();
      sum += Event::seconds_between(begin, end);
    }
    for (const auto& [begin, end] : marked()) sum += 1e-9 * static_cast<double>(end - begin);
    return sum;
  }
  /// Whether the device wrote all times that it was to write, in memory that held zeros. Waits likewise.
  bool are_told() const {
    return std::ranges::all_of(marked(),
                               [](const auto& span) { return 0 < span.first && span.first <= span.second; });
  }

 private:
  /// Nanoseconds at the ends of spans that have a clock.
  std::vector<std::pair<std::int64_t, std::int64_t>> marked() const {
    if (marks_.empty()) return {};
    const auto count = static_cast<std::size_t>(marks_.back().second + 1);
    const auto times = times_.values<std::int64_t>(count);
    std::vector<std::pair<std::int64_t, std::int64_t>> spans;
    for (const auto& [begin, end] : marks_)
      spans.emplace_back(times[static_cast<std::size_t>(begin)], times[static_cast<std::size_t>(end)]);
    return spans;
  }

  std::shared_ptr<Stream> stream_;
  std::vector<std::pair<Event, Event>> list_;
  std::shared_ptr<DeviceClock> clock_;
  std::vector<std::pair<std::int64_t, std::int64_t>> marks_;  ///< by clock_
  HostCopy times_;
};

}  // namespace tessera
