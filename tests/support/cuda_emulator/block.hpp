#pragma once
/// The scheduler of a block's threads: each on a fiber that stops at barriers.
///
/// One warp runs as far as it comes without the others, then the next: that is the order in which a barrier
/// missing between warps shows. A thread that stops goes straight to the next one that can go on: over the
/// scheduler it would be two changes of stack, and returns that no processor foresees. A fiber whose thread
/// ended takes the next thread that has not begun, so that kernels without barriers need one fiber.

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "fibers.hpp"
#include "runtime.hpp"

namespace tessera_emulator {

enum class At : std::uint8_t { start, ready, warp, block, end };
enum class WarpWait : std::uint8_t { exchange, gather, ballot, barrier };

struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  std::size_t bytes;
};

struct Thread {
  At at = At::start;
  Fiber* fiber = nullptr;
  uint3 index{};
  // What it waits for, and the answer.
  WarpWait wait{};
  Barrier barrier{};
  bool predicate = false;
  unsigned mask = 0;
  int source = 0;
  std::uint64_t bits = 0, result = 0;
  std::vector<AsyncCopy> copies;    // not awaited yet
  std::vector<std::size_t> groups;  // how many of them there were at each commit
};

struct Warp {
  unsigned live = 0, waiting = 0;  // lanes
  std::array<std::uint64_t, 32> given{};
};

/// Of one stream's host thread.
class Runner {
 public:
  Runner() : fibers_([this] { return run_threads(); }) {}
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  void run(const Grid& grid);
  void* shared() { return shared_.data() + shared_offset_; }

  int lane() const { return static_cast<int>(current_ % kLanes); }
  unsigned live() const { return warps_[current_ / kLanes].live; }
  std::uint64_t wait_for_warp(WarpWait wait, unsigned mask, std::uint64_t bits, int source, bool predicate);
  int wait_for_block(Barrier kind, bool predicate);
  Thread& thread() { return threads_[current_]; }

 private:
  static constexpr std::size_t kLanes = 32;

  void begin(const Grid& grid);
  void run_block();
  void run_warp(std::size_t warp);
  Fiber* run_threads();
  bool next_thread();
  Fiber& fiber();
  void enter(std::size_t thread);
  void finish_thread();
  void complete_warp(std::size_t warp, unsigned mask);
  void release_block();
  void give_up();
  void check_shared();
  void stop();
  template <typename Iterator>
  void arrange(Iterator begin, Iterator end);
  std::string where(std::size_t thread) const;

  const Grid* grid_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<std::size_t> warp_order_;
  std::array<std::size_t, kLanes> lane_order_{};
  std::size_t lanes_ = 0, position_ = 0, warp_ = 0, current_ = 0;
  std::uint64_t random_ = 0;
  bool progress_ = false, cancelling_ = false;
  std::exception_ptr error_;
  std::vector<unsigned char> shared_;
  std::size_t shared_offset_ = 0;
  FiberPool fibers_;
};

}  // namespace tessera_emulator
