#pragma once
/// A caching allocator: memory comes from the system in large segments and goes back to a free list, so that
/// a step like the one before it asks the system for nothing.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/device/stream.hpp"

namespace tessera {

/// Memory that recorded work was given, so that whoever launches it again can tell whether it may
/// (CachingAllocator::begin_use). Nothing is reserved: between two launches others may have the memory.
class MemoryUse {
 private:
  friend class CachingAllocator;
  /// First address and the one behind the last: as they were handed out; once ended sorted and joined.
  std::vector<std::pair<const char*, const char*>> ranges_;
  std::unordered_map<const void*, std::uint64_t>
      kept_;  ///< what is still there, with the allocation's number
  std::uint64_t lasting_ = 0;
  bool open_ = true, lost_ = false;
};

struct AllocatorStats {
  std::uint64_t allocations = 0;         ///< calls of allocate so far
  std::uint64_t system_allocations = 0;  ///< segments asked from the system so far
  std::size_t system_bytes = 0;          ///< bytes held from the system
  std::size_t used_bytes = 0;            ///< bytes handed out at present (rounded)
  std::size_t peak_used_bytes = 0;       ///< highest used_bytes since reset_peak()
};

/// Serves one stream: memory given back is handed out again at once, which is right because later work on the
/// same stream runs after the work that used it. Safe to call from several threads.
class CachingAllocator {
 public:
  /// Memory of the CPU.
  CachingAllocator();
  /// Memory of the stream's device; on meta addresses alone, which must never be followed.
  explicit CachingAllocator(std::shared_ptr<Stream> stream);
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  /// Uninitialised memory, 256-byte aligned; never null, also for 0 bytes.
  /// Errors: IoError, with the amounts, when the system has none.
  void* allocate(std::size_t bytes);
  /// Gives back what allocate returned.
  void release(void* pointer);
  AllocatorStats stats() const;
  void reset_peak();
  /// Returns wholly free segments to the system.
  void trim();

  /// What is allocated from here to end_use() is the use's, which one thread makes. One is open at a time.
  /// `lasting`: allocations before this number (AllocatorStats::allocations) that are there now are read by
  /// the work as well, and last as long as it does.
  std::shared_ptr<MemoryUse> begin_use(std::uint64_t lasting);
  void end_use(MemoryUse& use);
  /// Whether the work may be launched again now: nobody else has any of the use's memory, and none of the
  /// lasting allocations was released since begin_use().
  bool may_use(const MemoryUse& use) const;

  /// Memory of the host that the stream can copy to and from while the host goes on; its owner gives it back.
  /// Errors: IoError.
  std::shared_ptr<void> host_memory(std::size_t bytes);
  /// Its owner needs `memory` no longer, the stream until `event` is done.
  void keep_host_memory(std::shared_ptr<void> memory, const Event& event);
  /// Bytes from the host, which may be changed as soon as this returns. Plain on the CPU, nothing on meta.
  void copy_from_host(void* target, const void* source, std::size_t bytes);
  /// Bytes to the host, there when this returns. On CUDA that waits for the stream; on the CPU it is a plain
  /// copy. Errors: InvalidArgument on meta.
  void copy_to_host(void* target, const void* source, std::size_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
