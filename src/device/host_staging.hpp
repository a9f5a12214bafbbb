#pragma once
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/device/stream.hpp"

namespace tessera {

/// Pinned memory that is used again and again.
class PinnedPool {
 public:
  PinnedPool() = default;
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  /// At least `bytes`. Errors: IoError when the system has none left.
  void* take(std::size_t bytes);
  void give_back(void* memory);

 private:
  struct Block {
    void* memory;
    std::size_t size;
    bool free;
  };
  std::mutex mutex_;
  std::vector<Block> blocks_;
};

/// Bytes from the host to a device while the host goes on, by way of pinned memory.
class HostStaging {
 public:
  explicit HostStaging(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}

  /// `source` may be changed as soon as this returns. Errors: IoError.
  void copy(void* target, const void* source, std::size_t bytes);
  /// Pinned memory until its last owner is gone. Errors: IoError.
  std::shared_ptr<void> lend(std::size_t bytes);
  /// Holds what was lent until `event` is done.
  void keep(std::shared_ptr<void> memory, const Event& event);

 private:
  void reap();
  void drop_copies();

  std::shared_ptr<Stream> stream_;
  std::shared_ptr<PinnedPool> pool_ = std::make_shared<PinnedPool>();
  std::mutex mutex_;
  struct Copy {
    std::shared_ptr<void> memory;
    Event read;
    std::size_t bytes = 0;
  };
  std::vector<std::pair<std::shared_ptr<void>, Event>> leaving_;  ///< the stream still needs these
  std::deque<Copy> copies_;                                       ///< what copy() has under way
  std::size_t under_way_ = 0;                                     ///< their bytes
};

}  // namespace tessera
