#pragma once
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/nccl/lane.hpp"

namespace tessera {

/// What a message is, as its sender and its receiver see it; compared in the checking mode.
struct NcclAnnouncement {
  std::uint32_t tag = 0, dtype = 0;
  std::uint64_t bytes = 0;
  std::array<char, 112> where{};

  std::string describe() const;
};

/// An operation on one lane, or a batch of messages on several.
class NcclPending : public Pending::State {
 public:
  /// A message to be received, number `number` from that rank.
  struct Expected {
    int peer = 0, peer_name = 0;
    std::uint32_t number = 0;
    NcclAnnouncement own;
  };

  NcclPending(std::shared_ptr<NcclJob> job, std::shared_ptr<Communicator> control, std::string text)
      : job_(std::move(job)), control_(std::move(control)), text_(std::move(text)) {}

  void add(std::shared_ptr<NcclLane> lane, std::shared_ptr<NcclTask> task) {
    parts_.push_back({std::move(lane), std::move(task)});
  }
  /// The checking mode: what was sent to others, what has to come.
  void add_announced(Pending sent) { announced_.push_back(std::move(sent)); }
  void add_expected(const Expected& expected) { expected_.push_back(expected); }

  void wait(const ExecCtx& ctx) override;
  bool done() const override;

 private:
  struct Part {
    std::shared_ptr<NcclLane> lane;
    std::shared_ptr<NcclTask> task;
  };
  void check_messages();

  std::shared_ptr<NcclJob> job_;
  std::shared_ptr<Communicator> control_;
  std::string text_;
  std::vector<Part> parts_;
  std::mutex mutex_;  ///< guards what follows
  std::vector<Pending> announced_;
  std::vector<Expected> expected_;
};

/// The announcements travel under these tags on the control group.
constexpr std::uint32_t nccl_announcement_tag(std::uint32_t number) { return number % 0x7fffffffu + 1; }

}  // namespace tessera
