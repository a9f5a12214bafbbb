#pragma once
namespace tessera {

/// A communicator whose deadlines heartbeat() renews.
class Heartbeats {
 public:
  virtual ~Heartbeats() = default;
  virtual void heartbeat() = 0;
};

}  // namespace tessera
