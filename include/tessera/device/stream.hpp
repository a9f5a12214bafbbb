#pragma once
/// Streams and events: work on one stream runs in order; events order streams among each other. On the CPU a
/// stream either runs work in the calling thread at once (the compute stream) or in a thread of its own
/// (communication, input). Both keep the same contract, so code above does not know which it has.

#include <functional>
#include <memory>
#include <utility>

#include "tessera/device/device.hpp"

namespace tessera {

/// A point in a stream's work that other streams or the host can wait for. Copies share the point.
class Event {
 public:
  Event();
  /// True when everything before the recorded point is done; an event never recorded is done.
  bool done() const;
  /// Blocks the calling thread until done.
  void synchronize() const;

 private:
  friend class Stream;
  struct State;
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  enum class Mode { immediate, queued };

  /// A CPU stream whose kernels use up to `threads` threads. Errors: InvalidArgument if threads < 1.
  explicit Stream(int threads, Mode mode = Mode::immediate);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device device() const { return {}; }
  int threads() const { return threads_; }

  /// Runs `work` after everything launched before. An exception it throws is rethrown by this call on an
  /// immediate stream, by the next synchronize() on a queued one (later work on that stream is skipped until
  /// then).
  template <typename Work>
  void launch(Work&& work) {
    if (queue_ == nullptr) {
      std::forward<Work>(work)();
    } else {
      enqueue(std::function<void()>(std::forward<Work>(work)));
    }
  }
  /// Marks the present end of this stream's work in `event`.
  void record(Event& event);
  /// Work launched from now on starts only when `event` is done.
  void wait(const Event& event);
  /// Blocks until all work launched so far is done. Errors: whatever that work threw.
  void synchronize();

 private:
  struct Queue;
  void enqueue(std::function<void()> work);

  int threads_;
  std::unique_ptr<Queue> queue_;
};

}  // namespace tessera
