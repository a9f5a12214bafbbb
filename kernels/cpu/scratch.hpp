#pragma once
/// Working memory for kernels whose caller cannot know how much they need (GEMM packing and conversion).

#include <cstddef>

namespace tessera::kernels::cpu {

/// A buffer on loan, aligned to 64 bytes, contents undefined. Returned buffers are kept for later loans, so
/// that a program in steady state asks the system for nothing; how many are kept is bounded. What a buffer
/// held before is never read, so the pool behind this class cannot influence a result, and any thread may
/// borrow at any time.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace tessera::kernels::cpu
