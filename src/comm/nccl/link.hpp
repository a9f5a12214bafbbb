#pragma once
/// The two lanes between this rank and another one, for messages in either direction.

#include <array>
#include <memory>
#include <thread>

#include "comm/nccl/lane.hpp"

namespace tessera {

class NcclLink {
 public:
  struct Options {
    std::string group;
    int rank = 0, peer = 0;            ///< in the group
    int rank_name = 0, peer_name = 0;  ///< as messages name them
    double timeout_s = 0;
    std::shared_ptr<Communicator> control;  ///< of the group, over the host
    std::function<std::string(const NcclTask&)> explain;
  };

  /// Connects in a thread of its own, as soon as the other rank does the same.
  NcclLink(std::shared_ptr<NcclJob> job, Options options);
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  const std::shared_ptr<NcclLane>& lane(Transfer::Kind kind) const {
    return kind == Transfer::Kind::send ? out_ : in_;
  }
  /// The number of the next message in a direction.
  std::uint32_t count(Transfer::Kind kind) { return counts_[kind == Transfer::Kind::send ? 0 : 1]++; }
  /// Blocks until both directions have carried their first bytes. Errors: CommunicationError.
  void await_connection();
  void close();

 private:
  void connect();

  std::shared_ptr<NcclJob> job_;
  Options options_;
  std::shared_ptr<NcclLane> out_, in_;
  std::array<std::uint32_t, 2> counts_{};
  std::thread connector_;
};

}  // namespace tessera
