#pragma once
/// What the ranks of a test sent and when, by a Trace for each of them.

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/device/trace.hpp"

namespace tessera::test {

class Timeline {
 public:
  /// For set_trace. From each rank's thread.
  std::shared_ptr<Trace> start(int rank, Stream& stream) {
    auto trace = std::make_shared<Trace>(stream);
    const std::lock_guard lock(mutex_);
    traces_[rank] = trace;
    return trace;
  }

  /// Operations of a rank in a group that have ended, by begin; all of them, or those of one name.
  std::vector<TimedWork> of(int rank, const std::string& group, const std::string& operation = {}) const {
    std::vector<TimedWork> found;
    for (const TraceLane& lane : trace(rank)->lanes()) {
      if (lane.name != "communication " + group) continue;
      for (const TimedWork& each : lane.work) {
        if (operation.empty() || each.work.name == operation + " " + group) found.push_back(each);
      }
    }
    return found;
  }

 private:
  std::shared_ptr<Trace> trace(int rank) const {
    const std::lock_guard lock(mutex_);
    return traces_.at(rank);
  }

  mutable std::mutex mutex_;
  std::map<int, std::shared_ptr<Trace>> traces_;
};

}  // namespace tessera::test
