#include "device/host_staging.hpp"

#include <algorithm>
#include <cstring>

#include "device/cuda.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::size_t kLargestPart = std::size_t{4} << 20;
/// Parts under way at once: enough that the copy engine always has one, few enough that a long copy pins
/// little.
constexpr std::size_t kMostParts = 4;
constexpr std::size_t kSmallestBlock = std::size_t{4} << 10;

}  // namespace

PinnedPool::~PinnedPool() {
  for (const Block& block : blocks_) cuda::deallocate_pinned(block.memory);
}

void* PinnedPool::take(std::size_t bytes) {
  std::size_t size = kSmallestBlock;
  while (size < bytes) size *= 2;
  const std::lock_guard lock(mutex_);
  for (Block& block : blocks_) {
    if (block.free && block.size == size) {
      block.free = false;
      return block.memory;
    }
  }
  void* memory = cuda::allocate_pinned(size);
  TESSERA_ENSURE(IoError, memory != nullptr, "the system has no ", size,
                 " bytes of pinned memory left for copies between host and device");
  blocks_.push_back({memory, size, false});
  return memory;
}

void PinnedPool::give_back(void* memory) {
  const std::lock_guard lock(mutex_);
  for (Block& block : blocks_) {
    if (block.memory == memory) block.free = true;
  }
}

std::shared_ptr<void> HostStaging::lend(std::size_t bytes) {
  return {pool_->take(bytes), [pool = pool_](void* memory) { pool->give_back(memory); }};
}

void HostStaging::keep(std::shared_ptr<void> memory, const Event& event) {
  const std::lock_guard lock(mutex_);
  reap();
  leaving_.emplace_back(std::move(memory), event);
}

void HostStaging::reap() {
  const auto is_done = [](const auto& part) { return part.second.done(); };
  std::erase_if(leaving_, is_done);
  std::erase_if(copies_, is_done);
}

void HostStaging::copy(void* target, const void* source, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  reap();
  for (std::size_t done = 0; done < bytes; done += kLargestPart) {
    const std::size_t part = std::min(kLargestPart, bytes - done);
    if (copies_.size() >= kMostParts && !stream_->is_recorded()) {  // a recording's copies run later
      copies_.front().second.synchronize();
      copies_.pop_front();
    }
    const std::shared_ptr<void> memory = lend(part);
    std::memcpy(memory.get(), static_cast<const std::byte*>(source) + done, part);
    stream_->copy(static_cast<std::byte*>(target) + done, memory.get(), part);
    Event read;
    stream_->record(read);
    copies_.emplace_back(memory, read);
  }
}

}  // namespace tessera
