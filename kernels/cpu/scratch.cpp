#include "kernels/cpu/scratch.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

namespace tessera::kernels::cpu {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kGranule = std::size_t{1} << 16;
constexpr std::size_t kKept =
    64;  // idle buffers: more than the ranks one process is likely to run as threads

/// Idle buffers by size.
class Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    for (auto& [bytes, data] : idle_) std::free(data);
  }

  /// The smallest idle buffer of at least `bytes`, which becomes its true size; null if there is none. The
  /// largest idle buffer is then dropped: the larger one about to be allocated serves in its place from now
  /// on.
  void* take(std::size_t& bytes) {
    const std::lock_guard lock(mutex_);
    auto found = idle_.lower_bound(bytes);
    if (found == idle_.end()) {
      if (!idle_.empty()) {
        std::free(std::prev(idle_.end())->second);
        idle_.erase(std::prev(idle_.end()));
      }
      return nullptr;
    }
    bytes = found->first;
    void* data = found->second;
    idle_.erase(found);
    return data;
  }

  void give(void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    idle_.emplace(bytes, data);
    if (idle_.size() > kKept) {
      std::free(idle_.begin()->second);
      idle_.erase(idle_.begin());
    }
  }

 private:
  std::mutex mutex_;
  std::multimap<std::size_t, void*> idle_;
};

Pool& pool() {
  static Pool instance;
  return instance;
}

}  // namespace

Scratch::Scratch(std::size_t bytes) {
  if (bytes == 0) return;
  bytes_ = (bytes + kGranule - 1) / kGranule * kGranule;
  data_ = pool().take(bytes_);
  if (data_ == nullptr) data_ = std::aligned_alloc(kAlignment, bytes_);
  if (data_ == nullptr) throw std::bad_alloc();
}

Scratch::~Scratch() {
  if (data_ != nullptr) pool().give(data_, bytes_);
}

}  // namespace tessera::kernels::cpu
