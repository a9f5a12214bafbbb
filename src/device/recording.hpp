#pragma once
/// What events and streams know of a graph that is being recorded.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/device/stream.hpp"

namespace tessera {

/// One launch of a StreamGraph's work, and the recording before it if there was one. Until the graph is
/// launched, nothing recorded meanwhile has begun; afterwards all of it has begun when `begin` is done, and
/// is done when `end` is.
struct Recording {
  enum class Stage { open, launched, abandoned };

  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  std::atomic<Stage> stage = Stage::open;
  bool lasting = false;     ///< to be launched again: what joins is waited for before the graph
  bool reads_host = false;  ///< it copies from memory of the host, which is another turn's later
  void *begin = nullptr, *end = nullptr;  ///< events before and after the graph
  std::vector<Stream*> joined;            ///< beside the stream whose turn it is
  std::vector<Event> before;              ///< what these had to do, where it is waited for before the graph
  std::vector<Event> named;               ///< events outside that the graph waits for or records
  /// Who is told of further launches.
  std::shared_ptr<std::vector<Stream::Relaunched>> relaunched =
      std::make_shared<std::vector<Stream::Relaunched>>();
};

struct Event::State {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool done = true;
  std::chrono::steady_clock::time_point time;
  void* cuda = nullptr;                  ///< the event of a CUDA stream: then the members above are unused
  std::shared_ptr<Recording> recording;  ///< in which it was recorded, if it was; without `cuda`, all of it

  State() = default;
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void reach();
  bool is_done() const;
  bool has_begun() const;
  void wait() const;
  bool on_device() const { return cuda != nullptr || recording; }
  bool in_open_recording() const { return recording && recording->stage == Recording::Stage::open; }
  /// The event that says when this one is done; null if that will never be said, as a recording was
  /// abandoned.
  void* done_by() const;
};

}  // namespace tessera
