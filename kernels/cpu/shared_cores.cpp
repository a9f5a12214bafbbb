#include "kernels/api/shared_cores.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "tessera/base/clock.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kBetweenLooks_ns = 50'000'000;
// A share of the time, over so long that a program which wants a core for some milliseconds counts little.
// Far apart: a team that sleeps has a thread for each core, and is not made and ended at every turn.
constexpr double kCrowded = 0.1, kQuiet = 0.03, kOver_s = 0.25;

std::int64_t clock_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

/// Seconds that the thread was ready to run and had no core; 0 where the system does not say.
double waited_s(const std::string& file) {
  std::ifstream in(file);
  double ran_ns = 0, waited_ns = 0;
  return in >> ran_ns >> waited_ns ? 1e-9 * waited_ns : 0.0;
}

}  // namespace

bool SharedCores::Verdict::after(double looked_s, double waited_s) {
  share_ += std::min(1.0, looked_s / kOver_s) * (waited_s / looked_s - share_);
  if (share_ > kCrowded) crowded_ = true;
  if (share_ < kQuiet) crowded_ = false;
  return crowded_;
}

SharedCores::SharedCores()
    : file_("/proc/self/task/" + std::to_string(::gettid()) + "/schedstat"),
      next_look_ns_(clock_ns() + kBetweenLooks_ns),
      looked_s_(now_s()),
      waited_s_(waited_s(file_)) {}

bool SharedCores::crowded() {
  if (clock_ns() >= next_look_ns_.load(std::memory_order_relaxed)) look();
  return crowded_.load(std::memory_order_relaxed);
}

void SharedCores::look() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread looks
  const double now = now_s(), waited = waited_s(file_);
  const bool crowded = verdict_.after(now - looked_s_, waited - waited_s_);
  looked_s_ = now;
  waited_s_ = waited;
  if (crowded != (short_waits_ != nullptr))
    short_waits_ = crowded ? std::make_unique<kernels::ShortWaits>() : nullptr;
  crowded_.store(crowded, std::memory_order_relaxed);
  next_look_ns_.store(clock_ns() + kBetweenLooks_ns, std::memory_order_relaxed);
}

}  // namespace tessera
