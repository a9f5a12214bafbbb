#pragma once
/// Fibers of one host thread: each has a stack of its own, and one of them or the scheduler runs.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera_emulator {

class FiberPool;

class Fiber {
 public:
  /// From the scheduler; returns when the fiber stops.
  void resume();
  /// From the fiber; returns when it is resumed.
  void stop();

 private:
  friend class FiberPool;
  friend struct FiberEntry;
  void* own_ = nullptr;        // where it goes on
  void* scheduler_ = nullptr;  // where its scheduler goes on
  FiberPool* pool_ = nullptr;
  char* bottom_ = nullptr;
  // For the sanitizers.
  const void* scheduler_bottom_ = nullptr;
  std::size_t scheduler_size_ = 0;
  void *sanitizer_own_ = nullptr, *sanitizer_scheduler_ = nullptr;
};

class FiberPool {
 public:
  /// A fiber that is taken and resumed runs `body`, which does not throw, and is idle again.
  explicit FiberPool(std::function<void()> body) : body_(std::move(body)) {}
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  Fiber& take();
  /// Throws Fault if a fiber has used more stack than there is.
  void check_stacks();

 private:
  friend class Fiber;
  friend struct FiberEntry;
  void grow();

  std::function<void()> body_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::vector<void*> slabs_;
};

}  // namespace tessera_emulator
