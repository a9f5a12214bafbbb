#pragma once
/// Streams and events: work on one stream runs in order; events order streams among each other. On the CPU a
/// stream either runs work in the calling thread at once (the compute stream) or in a thread of its own
/// (communication, input); on CUDA it is a stream of the runtime. All keep the same contract, so code above
/// does not know which it has. On the meta device nothing runs.

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "tessera/device/device.hpp"

namespace tessera {

struct Recording;
class FlightRecorder;
class Trace;

/// A point in a stream's work that other streams or the host can wait for. Copies share the point.
class Event {
 public:
  Event();
  /// True when everything before the recorded point is done; an event never recorded is done.
  bool done() const;
  /// The same for a point in a graph (StreamGraph) means that the graph has begun.
  bool has_begun() const;
  /// Blocks the calling thread until done.
  void synchronize() const;
  /// Seconds from the point in `begin` to that in `end`, both done; 0 if one was never recorded.
  static double seconds_between(const Event& begin, const Event& end);

 private:
  friend class Stream;
  friend class StreamGraph;
  struct State;
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  enum class Mode { immediate, queued };
  enum class Priority { normal, high };

  /// A CPU stream whose kernels use up to `threads` threads. Errors: InvalidArgument if threads < 1.
  explicit Stream(int threads, Mode mode = Mode::immediate);
  /// A stream of a CUDA device, or of meta. Errors: ConfigError in a build without CUDA, DeviceError.
  explicit Stream(Device device, Priority priority = Priority::normal);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device device() const { return device_; }
  /// Threads of a kernel on the CPU; 1 on CUDA.
  int threads() const { return threads_; }
  /// The cudaStream_t of a CUDA stream; null on the CPU.
  void* native() const { return native_; }
  /// Whether work may still be running when the call that launched it has returned.
  bool is_asynchronous() const { return native_ != nullptr || queue_ != nullptr; }
  /// Whether a StreamGraph is recording what is launched here.
  bool is_recorded() const { return recording_ != nullptr; }
  /// Makes this stream's device the calling thread's, as launching CUDA kernels needs. Nothing on the CPU.
  void make_current() const;

  /// CPU streams: runs `work` after everything launched before; on meta nothing is run. An exception it
  /// throws is rethrown by this call on an immediate stream, by the next synchronize() on a queued one (later
  /// work on that stream is skipped until then).
  template <typename Work>
  void launch(Work&& work) {
    if (device_.is_meta()) return;
    if (!is_asynchronous()) {
      std::forward<Work>(work)();
    } else {
      enqueue(std::function<void()>(std::forward<Work>(work)));
    }
  }
  /// Copies bytes in the order of the stream; for CUDA streams `target` and `source` are device or pinned
  /// memory. Both stay alive until then.
  void copy(void* target, const void* source, std::size_t bytes);
  /// Marks the present end of this stream's work in `event`.
  void record(Event& event);
  /// The same for Event::seconds_between: no stream may wait for it.
  void record_time(Event& event);
  /// Work launched from now on starts only when `event` is done.
  void wait(const Event& event);
  /// Calls `told` whenever a graph that is being recorded here is launched again as it is, just before, with
  /// an event that has begun when the graph has, and is done when the graph is. Nothing where nothing is
  /// recorded. Errors: what it throws keeps the graph from being launched.
  using Relaunched = std::function<void(const Event& launch)>;
  void when_relaunched(Relaunched told);
  /// Blocks until all work launched so far is done. Errors: whatever that work threw.
  void synchronize();

  /// Who is told what runs here (trace.hpp); null, the default: nobody. Not while another thread launches.
  void set_trace(std::shared_ptr<Trace> trace) { trace_ = std::move(trace); }
  const std::shared_ptr<Trace>& trace() const { return trace_; }
  /// The rank's flight recorder (flight.hpp); null, the default: none. Not while another thread launches.
  void set_flight(std::shared_ptr<FlightRecorder> flight) { flight_ = std::move(flight); }
  const std::shared_ptr<FlightRecorder>& flight() const { return flight_; }

 private:
  friend class StreamGraph;
  struct Queue;
  void enqueue(std::function<void()> work);
  void wait_on_device(const Event& event);

  int threads_ = 1;
  Device device_;
  void* native_ = nullptr;
  std::unique_ptr<Queue> queue_;
  std::shared_ptr<Recording> recording_;
  std::shared_ptr<Trace> trace_;
  std::shared_ptr<FlightRecorder> flight_;
};

}  // namespace tessera
