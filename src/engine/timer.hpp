#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "tessera/device/stream.hpp"

namespace tessera {

/// Stretches of a stream's work, timed where it runs.
class Spans {
 public:
  explicit Spans(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

  /// From its construction to its end of life.
  class Span {
   public:
    explicit Span(Spans& spans) : spans_(spans) { spans_.stream_->record_time(begin_); }
    ~Span() {
      Event end;
      spans_.stream_->record_time(end);
      spans_.list_.emplace_back(begin_, end);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    Spans& spans_;
    Event begin_;
  };

  /// Of all spans together. Waits until their work is done.
  double seconds() const {
    double sum = 0;
    for (const auto& [begin, end] : list_) {
      end.synchronize();
      sum += Event::seconds_between(begin, end);
    }
    return sum;
  }

 private:
  std::shared_ptr<Stream> stream_;
  std::vector<std::pair<Event, Event>> list_;
};

}  // namespace tessera
