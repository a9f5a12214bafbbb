#include "comm/nccl/job.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>

#include "comm/gloo_signals.hpp"
#include "comm/heartbeats.hpp"
#include "comm/nccl/lane.hpp"
#include "device/cuda.hpp"
#include "kernels/api/backends.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/heartbeat.hpp"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kBusyPeriod = std::chrono::milliseconds(1);
constexpr auto kIdlePeriod = std::chrono::milliseconds(50);

}  // namespace

NcclJob::NcclJob(std::shared_ptr<Communicator> host, Device device)
    : host_(std::move(host)),
      device_(device),
      warm_up_memory_(cuda::allocate(device.index, kWarmUpBytes), cuda::deallocate) {
  TESSERA_ENSURE(DeviceError, warm_up_memory_ != nullptr, device, " has no memory left for NCCL");
  // The first launch of a kernel may wait for everything on the device: for kernels that wait for other
  // ranks.
  cuda::use_device(device.index);
  kernels::cuda::load_kernels();
  const SignalsBlocked signals;
  thread_ = std::thread([this] { run(); });
}

NcclJob::~NcclJob() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void NcclJob::watch(const std::shared_ptr<NcclLane>& lane) {
  const std::lock_guard lock(mutex_);
  std::erase_if(lanes_, [](const auto& each) { return each.expired(); });
  lanes_.push_back(lane);
}

void NcclJob::wake() {
  if (!idle_.exchange(false)) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void NcclJob::fail(const std::string& reason) {
  fail_here(reason);
  host_->abort(failure());
}

void NcclJob::fail_here(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  reason_ = reason;
  failed_ = true;
  idle_ = false;
  changed_.notify_all();
}

std::string NcclJob::failure() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

void NcclJob::check(const std::string& doing) const {
  if (failed_) throw CommunicationError(detail::concat(failure(), " (", doing, ")"));
}

void NcclJob::heartbeat() { tessera::heartbeat(*host_); }

Clock::time_point NcclJob::last_heartbeat() const {
  const auto* const beats = dynamic_cast<const Heartbeats*>(host_.get());
  return beats == nullptr ? Clock::time_point::min() : beats->last_heartbeat();
}

bool NcclJob::is_overdue(Clock::time_point begin, double timeout_s) const {
  return Clock::now() - std::max(begin, last_heartbeat()) > std::chrono::duration<double>(timeout_s);
}

double NcclJob::time_of(const Event& event) {
  if (!clock_) clock_ = std::make_unique<Stream>(device_);
  Event now;
  clock_->record(now);  // nothing else is on this stream
  now.synchronize();
  const double now_s = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  return now_s - Event::seconds_between(event, now);
}

void NcclJob::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    idle_ = true;
    bool busy = false;
    try {
      busy = look();
    } catch (const std::exception& error) {
      fail(detail::concat("watching what runs on ", device_, " failed: ", error.what()));
    }
    lock.lock();
    if (busy) {
      changed_.wait_for(lock, kBusyPeriod, [&] { return stopping_; });
    } else if (idle_ && !stopping_) {
      changed_.wait_for(lock, kIdlePeriod);
    }
  }
}

bool NcclJob::look() {
  std::vector<std::shared_ptr<NcclLane>> lanes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& each : lanes_) {
      if (auto lane = each.lock()) lanes.push_back(std::move(lane));
    }
  }
  // Freed when every lane has ended: to free memory may wait for the device, and so for their kernels.
  std::deque<NcclLane::Posted> dropped;
  bool busy = false;
  for (const auto& lane : lanes) {
    if (!failed_) {
      const std::string reason = lane->host_failure();
      if (!reason.empty()) fail(reason);
    }
    if (failed_) {
      std::ranges::move(lane->end_kernels(), std::back_inserter(dropped));
    } else {
      busy = lane->look() || busy;
    }
  }
  return busy;
}

}  // namespace tessera
