#pragma once
/// Fibers of one host thread: each has a stack of its own, and one of them or the scheduler runs.

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace tessera_emulator {

class FiberPool;

/// Where something that stands still goes on.
struct Place {
  void* at = nullptr;
  // For the sanitizers.
  const void* bottom = nullptr;
  std::size_t size = 0;
  void* sanitizer = nullptr;
};

class Fiber {
 private:
  friend class FiberPool;
  Place place_;
  char* bottom_ = nullptr;
};

class FiberPool {
 public:
  /// A fiber that is taken and gone to runs `body`, which does not throw and says what is gone to next: a
  /// fiber, or null for the scheduler. The fiber is idle from then on.
  explicit FiberPool(std::function<Fiber*()> body) : body_(std::move(body)) {}
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  Fiber& take();
  /// From the scheduler to a fiber; returns when one comes back.
  void run(Fiber& fiber);
  /// From a fiber to another, or to the scheduler if null; returns when somebody goes to `self`.
  [[gnu::always_inline]] void leave(Fiber& self, Fiber* next) {
    if (next != nullptr) entered_ = next;
    go(self.place_, next != nullptr ? next->place_ : scheduler_);
  }
  /// Throws Fault if a fiber has used more stack than there is, of those taken since the last time.
  void check_stacks();

 private:
  friend struct FiberEntry;
  void grow();
  // Inlined: a jump is a call that its place does not return from, so that each return after it is foreseen
  // wrongly by the processor.
  [[gnu::always_inline]] void go(Place& from, Place& to) {
    void* fake_stack = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack, to.bottom, to.size);
#endif
#if defined(__SANITIZE_THREAD__)
    from.sanitizer = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to.sanitizer, 0);
#endif
    left_ = &from;
    arrive(boost::context::detail::jump_fcontext(to.at, this).fctx, fake_stack);
  }
  /// The other end of a jump: the place that was left goes on there.
  [[gnu::always_inline]] void arrive(void* left_at, [[maybe_unused]] void* fake_stack) {
    left_->at = left_at;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &left_->bottom, &left_->size);
#endif
  }

  std::function<Fiber*()> body_;
  Place scheduler_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::size_t untouched_ = 0;  // of the idle ones, since the last check
  Place* left_ = nullptr;      // at the latest jump
  Fiber* entered_ = nullptr;   // the fiber that was gone to last
  std::vector<void*> slabs_;
};

}  // namespace tessera_emulator
