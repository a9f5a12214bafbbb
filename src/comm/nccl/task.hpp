#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/check.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/communicator.hpp"
#include "tessera/device/stream.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// One operation, or one message of a batch, from its call to its end on the GPU.
class NcclTask {
 public:
  using Clock = std::chrono::steady_clock;

  /// What was called, for messages and comparisons. A graph that is launched again calls the same.
  struct What {
    const char* operation = "";
    std::string place;  ///< "group dp (ranks 0, 1) at file.cpp:12"
    CallSignature call;
    int peer = -1;  ///< of a message: the other end, as messages name it
  };

  std::shared_ptr<const What> what;
  std::uint64_t sequence = 0;
  bool in_graph = false;  ///< with a beginning and an end that are the graph's
  Event ready;            ///< of the caller's stream: the operation may begin
  Event end;              ///< to be read once launched
  std::atomic<bool> launched = false;
  std::function<void(double)> finished, held_up;
  bool timed = false;                      ///< whether `finished` reads the time
  std::function<RepeatedCall()> again;     ///< of a recorded one: Request::again of what it is part of
  std::optional<Clock::time_point> began;  ///< when the watchdog saw that nothing was in its way

  explicit NcclTask(std::vector<Tensor> tensors) : tensors_(std::move(tensors)) {}

  bool done() const { return launched && end.done(); }
  std::string text() const {
    return detail::concat(what->operation, " ", sequence, " on ", what->place,
                          in_graph ? ", in a CUDA graph," : "");
  }
  /// Makes `stream` wait for the end, and lets go of the tensors: their memory is used again in the order of
  /// that stream.
  void order(Stream& stream) {
    const std::lock_guard lock(mutex_);
    // Not in a recording, whose events all tell of the graph's end: what is recorded must not depend on how
    // far the GPU has come, or the graph is made anew.
    if (!arrived_ && held_up && !stream.is_recorded() && !end.done()) {
      arrived_.emplace();
      stream.record(*arrived_);
    }
    stream.wait(end);
    tensors_.clear();
  }
  /// After the end: tells how long the stream that was ordered had nothing else to do.
  void report_stall() {
    const std::lock_guard lock(mutex_);
    tensors_.clear();
    if (!arrived_ || !arrived_->done()) return;
    const double stall_s = Event::seconds_between(*arrived_, end);
    if (stall_s > 0) held_up(stall_s);
  }

 private:
  std::mutex mutex_;
  std::vector<Tensor> tensors_;
  std::optional<Event> arrived_;  ///< where the stream came to the wait
};

}  // namespace tessera
