#include "fibers.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "emulator.hpp"

namespace tessera_emulator {
namespace {

namespace context = boost::context::detail;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStack = 256 * 1024;  // instrumented frames are large
#else
constexpr std::size_t kStack = 64 * 1024;
#endif
constexpr std::size_t kStacksOfSlab = 32;
/// Stacks begin at different places of their pages: where all lanes of a warp run in turn, what is on top of
/// their stacks would else share a few lines of the cache.
constexpr std::size_t kShift = 4096 / kStacksOfSlab;
constexpr std::uint64_t kCanary = 0x5ca1ab1e0ddba115ull;

/// Mappings that pools have given back: a stack keeps the pages that were touched.
struct IdleSlabs {
  std::mutex mutex;
  std::vector<void*> slabs;
};
IdleSlabs& idle_slabs() {
  static IdleSlabs* const instance = new IdleSlabs;  // streams may end with the process
  return *instance;
}

/// Many stacks from one mapping: the system allows a process only so many.
void* take_slab() {
  {
    IdleSlabs& idle = idle_slabs();
    const std::lock_guard lock(idle.mutex);
    if (!idle.slabs.empty()) {
      void* const slab = idle.slabs.back();
      idle.slabs.pop_back();
      return slab;
    }
  }
  void* const slab = mmap(nullptr, kStack * kStacksOfSlab, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (slab == MAP_FAILED) throw std::bad_alloc();
  return slab;
}

std::uint64_t& canary_of(char* bottom) { return *reinterpret_cast<std::uint64_t*>(bottom); }

}  // namespace

struct FiberEntry {
  static void main(context::transfer_t transfer) {
    FiberPool& pool = *static_cast<FiberPool*>(transfer.data);
    pool.arrive(transfer.fctx, nullptr);
    Fiber& self = *pool.entered_;
    while (true) {
      Fiber* const next = pool.body_();
      pool.idle_.push_back(&self);
      pool.leave(self, next);
    }
  }
};

void FiberPool::run(Fiber& fiber) {
  entered_ = &fiber;
  go(scheduler_, fiber.place_);
}

FiberPool::~FiberPool() {
#if defined(__SANITIZE_THREAD__)
  for (const auto& fiber : fibers_) __tsan_destroy_fiber(fiber->place_.sanitizer);
#endif
#if defined(__SANITIZE_ADDRESS__)
  // Idle fibers stand in frames that are never left.
  for (void* slab : slabs_) ASAN_UNPOISON_MEMORY_REGION(slab, kStack * kStacksOfSlab);
#endif
  IdleSlabs& idle = idle_slabs();
  const std::lock_guard lock(idle.mutex);
  idle.slabs.insert(idle.slabs.end(), slabs_.begin(), slabs_.end());
}

void FiberPool::grow() {
  void* const slab = take_slab();
  slabs_.push_back(slab);
  for (std::size_t i = kStacksOfSlab; i-- > 0;) {
    auto fiber = std::make_unique<Fiber>();
    fiber->bottom_ = static_cast<char*>(slab) + i * kStack;
    canary_of(fiber->bottom_) = kCanary;
    const std::size_t size = kStack - i * kShift;
    fiber->place_.at = context::make_fcontext(fiber->bottom_ + size, size, FiberEntry::main);
    fiber->place_.bottom = fiber->bottom_;
    fiber->place_.size = kStack;
#if defined(__SANITIZE_THREAD__)
    fiber->place_.sanitizer = __tsan_create_fiber(0);
#endif
    idle_.push_back(fiber.get());
    fibers_.push_back(std::move(fiber));
  }
}

Fiber& FiberPool::take() {
  if (idle_.empty()) grow();
  Fiber& fiber = *idle_.back();
  idle_.pop_back();
  untouched_ = std::min(untouched_, idle_.size());
  return fiber;
}

void FiberPool::check_stacks() {
  // All are idle again, in another order: those never taken lie below.
  for (; untouched_ < idle_.size(); ++untouched_) {
    std::uint64_t& canary = canary_of(idle_[untouched_]->bottom_);
    if (canary == kCanary) continue;
    canary = kCanary;
    throw Fault("a thread used more than " + std::to_string(kStack / 1024) + " KB of stack");
  }
}

}  // namespace tessera_emulator
