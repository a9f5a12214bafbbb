#pragma once
/// What the backend has to tell whoever runs it. Kept until it is taken; each note comes once.

#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace tessera::kernels::cuda {

class Notes {
 public:
  void add(const std::string& note) {
    const std::lock_guard lock(mutex_);
    if (note.empty() || !told_.insert(note).second) return;
    waiting_ += (waiting_.empty() ? "" : "\n") + note;
  }
  /// Those since the last call, a line each.
  std::string take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(waiting_, "");
  }

 private:
  std::mutex mutex_;
  std::set<std::string> told_;
  std::string waiting_;
};

/// Those of attention, of this process.
Notes& attention_notes();

}  // namespace tessera::kernels::cuda
