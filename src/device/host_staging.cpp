#include "device/host_staging.hpp"

#include <algorithm>
#include <cstring>

#include "device/cuda.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::size_t kLargestPart = std::size_t{4} << 20;
/// Bytes under way at once: enough that the copy engine always has some, few enough that a long copy pins
/// little and that small ones, the batches of steps that were launched ahead, never wait.
constexpr std::size_t kRing = 4 * kLargestPart;
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
  std::erase_if(leaving_, [](const auto& part) { return part.second.done(); });
  drop_copies();
}

/// Those that were read, from the oldest on.
void HostStaging::drop_copies() {
  for (; !copies_.empty() && copies_.front().read.done(); copies_.pop_front())
    under_way_ -= copies_.front().bytes;
}

void HostStaging::copy(void* target, const void* source, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  reap();
  for (std::size_t done = 0; done < bytes; done += kLargestPart) {
    const std::size_t part = std::min(kLargestPart, bytes - done);
    while (under_way_ + part > kRing && !copies_.empty() && !stream_->is_recorded()) {
      copies_.front().read.synchronize();  // a recording's copies run later
      drop_copies();
    }
    const std::shared_ptr<void> memory = lend(part);
    std::memcpy(memory.get(), static_cast<const std::byte*>(source) + done, part);
    stream_->copy(static_cast<std::byte*>(target) + done, memory.get(), part);
    Event read;
    stream_->record(read);
    copies_.push_back({memory, read, part});
    under_way_ += part;
  }
}

}  // namespace tessera
