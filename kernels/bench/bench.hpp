#pragma once
/// What the kernel benches share: timing, memory and the machine's line.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "kernels/api/backends.hpp"
#include "kernels/cpu/vector/isa.hpp"
#include "tessera/base/dtype.hpp"

namespace tessera::bench {

/// The shortest of some calls of f, in seconds, after one that is not counted. The shortest, because what
/// others do to the machine can only lengthen a call.
template <typename F>
double shortest(F&& f, double budget_s = 0.5) {
  using Clock = std::chrono::steady_clock;
  f();
  double best = 1e30, spent = 0.0;
  for (int i = 0; i < 3 || (spent < budget_s && i < 1000); ++i) {
    const auto begin = Clock::now();
    f();
    const double s = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::min(best, s);
    spent += s;
  }
  return best;
}

/// n elements, aligned to pages, small values of both signs.
class Array {
 public:
  Array(DType dtype, std::int64_t n) {
    const std::size_t bytes = (static_cast<std::size_t>(n) * size_of(dtype) + 4095) / 4096 * 4096;
    data_.reset(std::aligned_alloc(4096, bytes));
    for (std::int64_t i = 0; i < n; ++i) {
      const float value = static_cast<float>(i * 7919 % 1000) / 1000.0f - 0.5f;
      if (dtype == DType::bf16) {
        static_cast<bfloat16*>(data_.get())[i] = bfloat16(value);
      } else {
        static_cast<float*>(data_.get())[i] = value;
      }
    }
  }
  void* data() { return data_.get(); }
  float* floats() { return static_cast<float*>(data_.get()); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
};

inline void print_machine(int threads) {
  for (const auto& [what, value] : kernels::cpu::describe())
    std::printf("%s: %s   ", what.c_str(), value.c_str());
  std::printf("threads: %d\n", threads);
}

}  // namespace tessera::bench
