#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera {

class NcclLane;

/// What all communicators of one rank that come from one make_nccl_communicator share: the first reason why
/// they cannot go on, and the thread that watches what is on the GPU.
class NcclJob {
 public:
  NcclJob(std::shared_ptr<Communicator> host, Device device);
  ~NcclJob();

  Device device() const { return device_; }
  /// kWarmUpBytes of the device's, for first calls; several lanes at once use it, none reads it.
  void* warm_up_memory() const { return warm_up_memory_.get(); }
  static constexpr std::size_t kWarmUpBytes = 256;
  /// This rank, as messages name it.
  int rank() const { return host_->rank(); }
  void watch(const std::shared_ptr<NcclLane>& lane);
  /// Something was launched: the watchdog looks often again.
  void wake();

  /// Ends everything here and, over the host communicator, on all other ranks. The first reason stays. Never
  /// waits.
  void fail(const std::string& reason);
  /// Ends everything here; others are told by whoever knows why.
  void fail_here(const std::string& reason);
  bool failed() const { return failed_; }
  std::string failure() const;
  /// Errors: CommunicationError once failed, with what was being done.
  void check(const std::string& doing) const;

  /// This rank's sign of work, for the waits of all ranks.
  void heartbeat();
  std::chrono::steady_clock::time_point last_heartbeat() const;
  /// Whether a wait that began then has lasted too long: `timeout_s` without an end, and without a heartbeat
  /// of any rank.
  bool is_overdue(std::chrono::steady_clock::time_point begin, double timeout_s) const;

  /// When an event that is done happened, on the host's steady clock.
  double time_of(const Event& event);

 private:
  void run();
  /// Whether anything was in flight.
  bool look();

  std::shared_ptr<Communicator> host_;
  Device device_;
  std::shared_ptr<void> warm_up_memory_;  ///< freed once all lanes have ended: that waits for the device
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<NcclLane>> lanes_;
  std::atomic<bool> failed_ = false, idle_ = false;
  std::string reason_;
  bool stopping_ = false;
  std::unique_ptr<Stream> clock_;  ///< for time_of; used by the watchdog only
  std::thread thread_;
};

}  // namespace tessera
