#include "tessera/device/allocator.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <mutex>
#include <set>
#include <unordered_map>

#include "device/cuda.hpp"
#include "device/host_staging.hpp"
#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSmallLimit = std::size_t{1} << 20;  // requests below share small segments
constexpr std::size_t kSmallSegment = std::size_t{4} << 20;
constexpr std::size_t kLargeSegment = std::size_t{32} << 20;

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

/// Memory for segments, from the CPU's system or a device.
class Source {
 public:
  virtual ~Source() = default;
  /// Null when there is none left.
  virtual char* allocate(std::size_t bytes) = 0;
  virtual void release(char* segment, std::size_t bytes) noexcept = 0;
  /// Whether segments may go back in the middle of work.
  virtual bool releases() const { return false; }
  /// What was released can be had again when this returns.
  virtual void settle() {}
};

class HostSource : public Source {
 public:
  char* allocate(std::size_t bytes) override {
    // Over-map by one huge page and cut the ends off, so that the kernel can back the segment with huge
    // pages.
    void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    char* begin = reinterpret_cast<char*>(round_up(reinterpret_cast<std::size_t>(raw), kHugePage));
    char* raw_begin = static_cast<char*>(raw);
    if (begin > raw_begin) munmap(raw_begin, static_cast<std::size_t>(begin - raw_begin));
    const std::size_t tail = kHugePage - static_cast<std::size_t>(begin - raw_begin);
    if (tail > 0) munmap(begin + bytes, tail);
    madvise(begin, bytes, MADV_HUGEPAGE);
    return begin;
  }
  void release(char* segment, std::size_t bytes) noexcept override { munmap(segment, bytes); }
};

/// Segments come and go in the order of a stream of their own. cudaFree would wait for everything on the
/// device, and so for messages that are received ahead of need: their senders may be waiting for this rank.
/// Here the only wait is for what this rank computes.
class CudaSource : public Source {
 public:
  explicit CudaSource(std::shared_ptr<Stream> user)
      : user_(std::move(user)), order_(user_->device()), pool_(cuda::create_pool(user_->device().index)) {}
  CudaSource(const CudaSource&) = delete;
  CudaSource& operator=(const CudaSource&) = delete;
  ~CudaSource() override {
    if (pool_ != nullptr) cuda::destroy_pool(pool_);
  }

  char* allocate(std::size_t bytes) override {
    user_->make_current();
    if (pool_ == nullptr) return static_cast<char*>(cuda::allocate(user_->device().index, bytes));
    void* const memory = cuda::allocate_from(pool_, bytes, order_.native());
    order_.synchronize();  // the user's stream, which may be recorded, need not wait
    return static_cast<char*>(memory);
  }
  bool releases() const override { return pool_ != nullptr && !user_->is_recorded(); }
  void release(char* segment, std::size_t) noexcept override {
    if (pool_ == nullptr) return cuda::deallocate(segment);
    try {
      user_->make_current();
      Event used;
      user_->record(used);
      order_.wait(used);
    } catch (const std::exception&) {
      // The device has failed: whoever waits for its work hears of it there.
    }
    cuda::deallocate_to_pool(segment, order_.native());
  }
  void settle() override {
    order_.synchronize();
    cuda::trim_pool(pool_);
  }

 private:
  std::shared_ptr<Stream> user_;
  Stream order_;
  void* pool_;
};

/// Addresses of the meta device. No system maps anything there, so to follow one ends the process at once.
class MetaSource : public Source {
 public:
  char* allocate(std::size_t bytes) override {
    char* const begin = reinterpret_cast<char*>(next_);
    next_ += round_up(bytes, kHugePage);
    return begin;
  }
  void release(char*, std::size_t) noexcept override {}

 private:
  std::uintptr_t next_ = std::uintptr_t{1} << 55;
};

/// A stretch of a segment, linked to its neighbours in address order.
struct Block {
  char* address;
  std::size_t size;
  bool free;
  bool small;
  std::uint64_t number = 0;  ///< of the allocation that has it
  bool recorded = false;     ///< which was made in a MemoryUse
  Block* previous = nullptr;
  Block* next = nullptr;
};

/// First address and the one behind the last.
using MemoryRange = std::pair<const char*, const char*>;

MemoryRange range_of(const Block& block) { return {block.address, block.address + block.size}; }

/// Sorts them, and makes one of those that touch.
void join(std::vector<MemoryRange>& ranges) {
  std::ranges::sort(ranges);
  std::vector<MemoryRange> joined;
  for (const MemoryRange& range : ranges) {
    if (!joined.empty() && range.first <= joined.back().second) {
      joined.back().second = std::max(joined.back().second, range.second);
    } else {
      joined.push_back(range);
    }
  }
  ranges = std::move(joined);
}

/// Whether one of the joined ranges has an address of `other`.
bool overlaps(const std::vector<MemoryRange>& ranges, const MemoryRange& other) {
  const auto behind = std::ranges::upper_bound(ranges, other.first, std::less<>(),
                                               [](const MemoryRange& r) { return r.first; });
  if (behind != ranges.end() && behind->first < other.second) return true;
  return behind != ranges.begin() && std::prev(behind)->second > other.first;
}

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
};

}  // namespace

struct CachingAllocator::Impl {
  explicit Impl(std::shared_ptr<Stream> of) : stream(std::move(of)) {
    if (stream && stream->device().is_meta()) {
      source = std::make_unique<MetaSource>();
    } else if (stream) {
      source = std::make_unique<CudaSource>(stream);
      staging = std::make_unique<HostStaging>(stream);
    } else {
      source = std::make_unique<HostSource>();
    }
  }

  std::shared_ptr<Stream> stream;  ///< null: the CPU's memory, which serves any stream of it
  std::unique_ptr<Source> source;
  std::unique_ptr<HostStaging> staging;
  mutable std::mutex mutex;
  std::set<Block*, BySize> free_small, free_large;
  std::unordered_map<void*, Block*> used;
  AllocatorStats stats;
  std::shared_ptr<MemoryUse> open_use;
  std::vector<std::weak_ptr<MemoryUse>> uses;

  bool is_meta() const { return stream && stream->device().is_meta(); }
  std::string on_device() const { return stream ? detail::concat(" on ", stream->device()) : ""; }
  std::set<Block*, BySize>& free_list(bool small) { return small ? free_small : free_large; }

  Block* find(std::size_t size, bool small) {
    Block probe{nullptr, size, true, small};
    auto& list = free_list(small);
    const auto it = list.lower_bound(&probe);
    if (it == list.end()) return nullptr;
    Block* block = *it;
    list.erase(it);
    return block;
  }

  Block* new_segment(std::size_t size, bool small) {
    const std::size_t bytes = small ? kSmallSegment : std::max(kLargeSegment, round_up(size, kHugePage));
    char* begin = source->allocate(bytes);
    // What is cached in pieces of the wrong size may be what is missing. A graph being recorded uses it
    // later.
    if (begin == nullptr && source->releases()) {
      trim(true);
      trim(false);
      source->settle();
      begin = source->allocate(bytes);
    }
    TESSERA_ENSURE(IoError, begin != nullptr, "out of memory", on_device(), ": the system refused ", bytes,
                   " bytes while ", stats.system_bytes, " are held. Lower micro_batch_size or seq_length");
    ++stats.system_allocations;
    stats.system_bytes += bytes;
    return new Block{begin, bytes, true, small};
  }

  void split(Block* block, std::size_t size) {
    const std::size_t rest = block->size - size;
    const std::size_t least = block->small ? kAlignment : kSmallLimit;
    if (rest < least) return;
    auto* tail = new Block{block->address + size, rest, true, block->small};
    tail->previous = block;
    tail->next = block->next;
    if (tail->next) tail->next->previous = tail;
    block->next = tail;
    block->size = size;
    free_list(block->small).insert(tail);
  }

  template <typename Mark>
  void each_use(Mark&& mark) {
    std::erase_if(uses, [&](const std::weak_ptr<MemoryUse>& each) {
      const auto use = each.lock();
      if (use) mark(*use);
      return use == nullptr;
    });
  }

  /// Addresses that are the system's from now on.
  void lose(const MemoryRange& addresses);

  /// Joins `block` with the free block after it.
  void absorb_next(Block* block) {
    Block* next = block->next;
    free_list(block->small).erase(next);
    block->size += next->size;
    block->next = next->next;
    if (block->next) block->next->previous = block;
    delete next;
  }

  void trim(bool small) {
    auto& list = free_list(small);
    for (auto it = list.begin(); it != list.end();) {
      Block* block = *it;
      if (block->previous || block->next) {
        ++it;
        continue;
      }
      lose({block->address, block->address + block->size});
      source->release(block->address, block->size);
      stats.system_bytes -= block->size;
      it = list.erase(it);
      delete block;
    }
  }
};

void CachingAllocator::Impl::lose(const MemoryRange& addresses) {
  each_use([&](MemoryUse& use) { use.lost_ = use.lost_ || overlaps(use.ranges_, addresses); });
}

CachingAllocator::CachingAllocator() : impl_(std::make_unique<Impl>(nullptr)) {}

CachingAllocator::CachingAllocator(std::shared_ptr<Stream> stream)
    : impl_(std::make_unique<Impl>(stream->device().is_cpu() ? nullptr : std::move(stream))) {}

CachingAllocator::~CachingAllocator() { trim(); }

void* CachingAllocator::allocate(std::size_t bytes) {
  TESSERA_ENSURE(IoError, bytes <= std::numeric_limits<std::size_t>::max() / 2, "out of memory: ", bytes,
                 " bytes were asked for at once");  // more would wrap round when rounded up
  const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), kAlignment);
  const bool small = size < kSmallLimit;
  const std::lock_guard lock(impl_->mutex);
  Block* block = impl_->find(size, small);
  if (block == nullptr) block = impl_->new_segment(size, small);
  impl_->split(block, size);
  block->free = false;
  block->number = impl_->stats.allocations++;
  block->recorded = impl_->open_use != nullptr;
  if (block->recorded) impl_->open_use->ranges_.emplace_back(block->address, block->address + block->size);
  impl_->used.emplace(block->address, block);
  impl_->stats.used_bytes += block->size;
  impl_->stats.peak_used_bytes = std::max(impl_->stats.peak_used_bytes, impl_->stats.used_bytes);
  return block->address;
}

void CachingAllocator::release(void* pointer) {
  const std::lock_guard lock(impl_->mutex);
  const auto it = impl_->used.find(pointer);
  TESSERA_ENSURE(InternalError, it != impl_->used.end(), "released memory that was not allocated here");
  Block* block = it->second;
  impl_->used.erase(it);
  if (!block->recorded && !impl_->uses.empty())
    impl_->each_use([&](MemoryUse& use) { use.lost_ = use.lost_ || block->number < use.lasting_; });
  impl_->stats.used_bytes -= block->size;
  block->free = true;
  if (block->next && block->next->free) impl_->absorb_next(block);
  if (block->previous && block->previous->free) {
    block = block->previous;
    impl_->free_list(block->small).erase(block);
    impl_->absorb_next(block);
  }
  impl_->free_list(block->small).insert(block);
}

std::shared_ptr<MemoryUse> CachingAllocator::begin_use(std::uint64_t lasting) {
  const std::lock_guard lock(impl_->mutex);
  TESSERA_ENSURE(InternalError, impl_->open_use == nullptr, "a use of memory began inside of another one");
  impl_->open_use = std::make_shared<MemoryUse>();
  impl_->open_use->lasting_ = lasting;
  impl_->uses.push_back(impl_->open_use);
  return impl_->open_use;
}

void CachingAllocator::end_use(MemoryUse& use) {
  const std::lock_guard lock(impl_->mutex);
  impl_->open_use = nullptr;
  use.open_ = false;
  join(use.ranges_);
  for (const auto& [address, block] : impl_->used) {
    if (block->recorded && overlaps(use.ranges_, range_of(*block))) use.kept_.emplace(address, block->number);
  }
}

bool CachingAllocator::may_use(const MemoryUse& use) const {
  const std::lock_guard lock(impl_->mutex);
  if (use.open_ || use.lost_) return false;
  return std::ranges::none_of(impl_->used, [&](const auto& each) {
    const auto& [address, block] = each;
    if (!overlaps(use.ranges_, range_of(*block))) return false;
    const auto kept = use.kept_.find(address);
    return kept == use.kept_.end() || kept->second != block->number;
  });
}

AllocatorStats CachingAllocator::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

void CachingAllocator::reset_peak() {
  const std::lock_guard lock(impl_->mutex);
  impl_->stats.peak_used_bytes = impl_->stats.used_bytes;
}

void CachingAllocator::trim() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->stream && impl_->stream->is_recorded()) return;  // what is recorded will use it
  impl_->trim(true);
  impl_->trim(false);
}

std::shared_ptr<void> CachingAllocator::host_memory(std::size_t bytes) {
  if (impl_->staging) return impl_->staging->lend(bytes);
  return std::shared_ptr<std::byte[]>(new std::byte[std::max<std::size_t>(bytes, 1)]);
}

void CachingAllocator::keep_host_memory(std::shared_ptr<void> memory, const Event& event) {
  if (impl_->staging) return impl_->staging->keep(std::move(memory), event);
  event.synchronize();
}

void CachingAllocator::copy_from_host(void* target, const void* source, std::size_t bytes) {
  if (impl_->staging) return impl_->staging->copy(target, source, bytes);
  if (impl_->is_meta()) return;
  std::memcpy(target, source, bytes);
}

void CachingAllocator::copy_to_host(void* target, const void* source, std::size_t bytes) {
  TESSERA_CHECK(!impl_->is_meta(), "memory of the meta device cannot be read: nothing stands behind it");
  if (!impl_->stream) {
    std::memcpy(target, source, bytes);
    return;
  }
  impl_->stream->copy(target, source, bytes);
  impl_->stream->synchronize();
}

}  // namespace tessera
