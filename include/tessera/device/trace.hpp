#pragma once
/// What a rank does and when, for a timeline. A Trace belongs to the streams it was given to
/// (Stream::set_trace); whoever works on a stream describes that work with a TraceSpan, which costs one
/// branch while the stream has no trace. Work is timed where it runs: by the clock on a stream that runs it
/// in the calling thread, by events, read when all is over, on one that does not.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/device/stream.hpp"

namespace tessera {

namespace kernels {
struct Gemm;
}

/// What time is spent on; `scope` only holds others together, such as one pass of one micro-batch.
enum class WorkKind : std::uint8_t { gemm, attention, elementwise, optimizer, communication, data, scope };
std::string_view name_of(WorkKind kind);

/// A piece of work and the least it takes: operations, bytes read and written (sent, if communication).
struct Work {
  WorkKind kind = WorkKind::scope;
  std::string name = {};
  double flops = 0, bytes = 0;
  /// Of a matrix product: its parameters, whose pointers may dangle by now.
  std::shared_ptr<const kernels::Gemm> product = {};
};

/// Work with its time, in the seconds of now_s().
struct TimedWork {
  Work work;
  double begin_s = 0, end_s = 0;
};

/// Work of one place, by begin; what encloses comes before what it encloses.
struct TraceLane {
  std::string name;
  std::vector<TimedWork> work = {};
  bool overlaps = false;  ///< work may overlap without enclosing each other
};

class Trace {
 public:
  /// `stream`: where the rank computes. Waits for it if it runs on its own, to learn its clock.
  explicit Trace(Stream& stream);

  /// What goes on beside the rank's own work, at the place called `lane`. From any thread.
  void add(const std::string& lane, TimedWork work);
  /// All that was recorded. Waits for the stream's work. The first lane is that of the rank's own work: the
  /// stream's, or the calling thread's where that runs it. The latter comes in any case, then what went on
  /// beside.
  std::vector<TraceLane> lanes() const;

 private:
  friend class TraceSpan;
  struct Timed {
    Work work;
    Event begin, end;
  };

  bool asynchronous_;
  Event origin_;
  double origin_s_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::vector<TimedWork> host_;
  std::vector<Timed> stream_;
  std::vector<TraceLane> beside_;
};

/// Describes to the stream's trace, if it has one, what is done from its construction to its end of life.
class TraceSpan {
 public:
  /// `describe` returns the Work; it is called only if there is a trace.
  template <typename Describe>
  TraceSpan(Stream& stream, Describe&& describe) {
    if (stream.trace()) begin(stream, std::forward<Describe>(describe)());
  }
  ~TraceSpan() {
    if (open_) end();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  struct Open {
    Stream& stream;
    std::shared_ptr<Trace> trace;
    TimedWork work;
    Event begin;
  };
  void begin(Stream& stream, Work work);
  void end();
  std::unique_ptr<Open> open_;  ///< null without a trace
};

}  // namespace tessera
