#pragma once
#include <chrono>

namespace tessera {

/// A communicator whose deadlines heartbeat() renews.
class Heartbeats {
 public:
  virtual ~Heartbeats() = default;
  virtual void heartbeat() = 0;
  /// When this rank heard of the last one, of any rank of the job; before all times if of none.
  virtual std::chrono::steady_clock::time_point last_heartbeat() const = 0;
};

}  // namespace tessera
