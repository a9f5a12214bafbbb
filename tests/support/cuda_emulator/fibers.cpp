#include "fibers.hpp"

#include <sys/mman.h>

#include <boost/context/detail/fcontext.hpp>
#include <new>
#include <string>

#include "emulator.hpp"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

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

std::uint64_t& canary_of(char* bottom) { return *reinterpret_cast<std::uint64_t*>(bottom); }

}  // namespace

struct FiberEntry {
  static void main(context::transfer_t transfer) {
    Fiber& self = *static_cast<Fiber*>(transfer.data);
    self.scheduler_ = transfer.fctx;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &self.scheduler_bottom_, &self.scheduler_size_);
#endif
    while (true) {
      self.pool_->body_();
      self.pool_->idle_.push_back(&self);
      self.stop();
    }
  }
};

void Fiber::resume() {
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, bottom_, kStack);
#endif
#if defined(__SANITIZE_THREAD__)
  sanitizer_scheduler_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(sanitizer_own_, 0);
#endif
  own_ = context::jump_fcontext(own_, this).fctx;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

void Fiber::stop() {
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, scheduler_bottom_, scheduler_size_);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(sanitizer_scheduler_, 0);
#endif
  scheduler_ = context::jump_fcontext(scheduler_, nullptr).fctx;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, &scheduler_bottom_, &scheduler_size_);
#endif
}

FiberPool::~FiberPool() {
#if defined(__SANITIZE_THREAD__)
  for (const auto& fiber : fibers_) __tsan_destroy_fiber(fiber->sanitizer_own_);
#endif
  for (void* slab : slabs_) munmap(slab, kStack * kStacksOfSlab);
}

void FiberPool::grow() {
  // Many stacks from one mapping: the system allows a process only so many.
  void* const slab = mmap(nullptr, kStack * kStacksOfSlab, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (slab == MAP_FAILED) throw std::bad_alloc();
  slabs_.push_back(slab);
  for (std::size_t i = kStacksOfSlab; i-- > 0;) {
    auto fiber = std::make_unique<Fiber>();
    fiber->bottom_ = static_cast<char*>(slab) + i * kStack;
    canary_of(fiber->bottom_) = kCanary;
    const std::size_t size = kStack - i * kShift;
    fiber->own_ = context::make_fcontext(fiber->bottom_ + size, size, FiberEntry::main);
    fiber->pool_ = this;
#if defined(__SANITIZE_THREAD__)
    fiber->sanitizer_own_ = __tsan_create_fiber(0);
#endif
    idle_.push_back(fiber.get());
    fibers_.push_back(std::move(fiber));
  }
}

Fiber& FiberPool::take() {
  if (idle_.empty()) grow();
  Fiber& fiber = *idle_.back();
  idle_.pop_back();
  return fiber;
}

void FiberPool::check_stacks() {
  for (const auto& fiber : fibers_) {
    if (canary_of(fiber->bottom_) == kCanary) continue;
    canary_of(fiber->bottom_) = kCanary;
    throw Fault("a thread used more than " + std::to_string(kStack / 1024) + " KB of stack");
  }
}

}  // namespace tessera_emulator
