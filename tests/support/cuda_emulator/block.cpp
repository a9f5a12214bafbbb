#include "block.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

namespace tessera_emulator {
namespace {

constexpr std::size_t kSharedGuard = 256;
constexpr unsigned char kPoison = 0xff, kGuard = 0xa5;

/// Unwinds a thread of a block that was given up.
struct Cancelled {};

// The work of one thread at a time; kept for its fibers.
thread_local std::unique_ptr<Runner> runner;
thread_local Runner* running = nullptr;

std::string text(uint3 v) {
  std::ostringstream out;
  out << '(' << v.x << ',' << v.y << ',' << v.z << ')';
  return out.str();
}

Runner& here() {
  if (running == nullptr) throw Fault("a device function was called outside of a kernel");
  return *running;
}

}  // namespace

/// From a thread to whoever can go on, until it can itself.
[[gnu::always_inline]] inline void Runner::stop() {
  Fiber& self = *threads_[current_].fiber;
  fibers_.leave(self, !cancelling_ && next_thread() ? &fiber() : nullptr);
  if (cancelling_) throw Cancelled{};
}

template <typename Iterator>
void Runner::arrange(Iterator begin, Iterator end) {
  std::iota(begin, end, std::size_t{0});
  if (grid_->order.order == Order::descending) std::reverse(begin, end);
  if (grid_->order.order != Order::shuffled) return;
  for (auto left = end - begin; left > 1; --left) {
    random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(begin[left - 1],
              begin[static_cast<std::ptrdiff_t>((random_ >> 33) % static_cast<std::uint64_t>(left))]);
  }
}

void Runner::begin(const Grid& grid) {
  grid_ = &grid;
  blockDim = grid.block;
  gridDim = grid.grid;
  random_ = grid.order.seed * 0x9e3779b97f4a7c15ull;
  const std::size_t count = std::size_t{grid.block.x} * grid.block.y * grid.block.z;
  threads_.assign(count, {});
  std::size_t thread = 0;
  for (unsigned z = 0; z < grid.block.z; ++z) {
    for (unsigned y = 0; y < grid.block.y; ++y) {
      for (unsigned x = 0; x < grid.block.x; ++x) threads_[thread++].index = {x, y, z};
    }
  }
  warps_.assign((count + kLanes - 1) / kLanes, {});
  warp_order_.resize(warps_.size());
  shared_.resize(grid.shared_bytes + kSharedGuard + 128);
  shared_offset_ = (128 - reinterpret_cast<std::uintptr_t>(shared_.data()) % 128) % 128;
}

void Runner::run(const Grid& grid) {
  begin(grid);
  for (unsigned z = 0; z < grid.grid.z; ++z) {
    for (unsigned y = 0; y < grid.grid.y; ++y) {
      for (unsigned x = 0; x < grid.grid.x; ++x) {
        blockIdx = {x, y, z};
        run_block();
      }
    }
  }
  fibers_.check_stacks();
}

void Runner::run_block() {
  for (Thread& thread : threads_) {
    thread.at = At::start;
    thread.fiber = nullptr;
    thread.copies.clear();
    thread.groups.clear();
  }
  for (std::size_t warp = 0; warp < warps_.size(); ++warp) {
    const std::size_t lanes = std::min(kLanes, threads_.size() - warp * kLanes);
    warps_[warp] = {lanes == kLanes ? ~0u : (1u << lanes) - 1, 0};
  }
  std::fill_n(static_cast<unsigned char*>(shared()), grid_->shared_bytes, kPoison);
  std::fill_n(static_cast<unsigned char*>(shared()) + grid_->shared_bytes, kSharedGuard, kGuard);
  try {
    while (true) {
      arrange(warp_order_.begin(), warp_order_.end());
      for (const std::size_t warp : warp_order_) run_warp(warp);
      if (std::all_of(warps_.begin(), warps_.end(), [](const Warp& warp) { return warp.live == 0; })) break;
      release_block();
    }
    check_shared();
  } catch (...) {
    give_up();
    throw;
  }
}

/// Runs the lanes of a warp until all have ended or wait for what the warp alone cannot give.
void Runner::run_warp(std::size_t warp) {
  warp_ = warp;
  lanes_ = position_ = std::min(kLanes, threads_.size() - warp * kLanes);
  progress_ = true;
  if (next_thread()) fibers_.run(fiber());
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

/// Makes the next thread of the warp that can go on the current one; one that begins has no fiber yet.
bool Runner::next_thread() {
  while (true) {
    for (; position_ < lanes_; ++position_) {
      const std::size_t thread = warp_ * kLanes + lane_order_[position_];
      Thread& it = threads_[thread];
      if (it.at != At::start && it.at != At::ready) continue;
      it.at = At::ready;
      progress_ = true;
      ++position_;
      enter(thread);
      return true;
    }
    if (!std::exchange(progress_, false)) return false;
    arrange(lane_order_.begin(), lane_order_.begin() + static_cast<std::ptrdiff_t>(lanes_));
    position_ = 0;
  }
}

/// The current thread's.
Fiber& Runner::fiber() {
  Fiber*& its = threads_[current_].fiber;
  if (its == nullptr) its = &fibers_.take();
  return *its;
}

void Runner::enter(std::size_t thread) {
  current_ = thread;
  threadIdx = threads_[thread].index;
}

/// The body of a fiber: the current thread, then others, as long as the next one has not begun either.
Fiber* Runner::run_threads() {
  Fiber* const self = threads_[current_].fiber;
  try {
    do {
      threads_[current_].fiber = self;
      grid_->thread();
      finish_thread();
      if (!next_thread()) return nullptr;
    } while (threads_[current_].fiber == nullptr);
    return threads_[current_].fiber;
  } catch (const Cancelled&) {
    threads_[current_].at = At::end;
  } catch (...) {
    threads_[current_].at = At::end;
    error_ = std::current_exception();
  }
  return nullptr;
}

void Runner::finish_thread() {
  threads_[current_].at = At::end;
  Warp& warp = warps_[current_ / kLanes];
  warp.live &= ~(1u << (current_ % kLanes));
  // Others may have waited only for this one.
  for (unsigned left = warp.waiting; left != 0;) {
    const unsigned mask =
        threads_[current_ / kLanes * kLanes + static_cast<unsigned>(__builtin_ctz(left))].mask;
    left &= ~mask;
    complete_warp(current_ / kLanes, mask);
  }
}

std::uint64_t Runner::wait_for_warp(WarpWait wait, unsigned mask, std::uint64_t bits, int source,
                                    bool predicate) {
  Thread& self = threads_[current_];
  const std::size_t warp = current_ / kLanes;
  const unsigned bit = 1u << lane();
  if ((mask & bit) == 0) throw Fault(where(current_) + " is not in the mask of its own warp operation");
  self.wait = wait;
  self.mask = mask;
  self.bits = bits;
  self.source = source;
  self.predicate = predicate;
  self.at = At::warp;
  warps_[warp].waiting |= bit;
  complete_warp(warp, mask);
  if (self.at == At::warp) stop();
  self.at = At::ready;
  return self.result;
}

/// Gives the lanes of `mask` their answers if all of them that have not ended are there.
void Runner::complete_warp(std::size_t warp, unsigned mask) {
  Warp& it = warps_[warp];
  const unsigned taking_part = mask & it.live;
  if ((it.waiting & taking_part) != taking_part || taking_part == 0) return;
  Thread* const lanes = &threads_[warp * kLanes];
  const auto each = [&](auto&& visit) {
    for (unsigned left = taking_part; left != 0; left &= left - 1) visit(__builtin_ctz(left));
  };
  const Thread& first = lanes[__builtin_ctz(taking_part)];
  std::uint64_t ballot = 0;
  each([&](int lane) {
    if (lanes[lane].wait != first.wait || lanes[lane].mask != mask) {
      throw Fault("the lanes of a warp meet in different operations or with different masks (" +
                  where(warp * kLanes + static_cast<std::size_t>(lane)) + ")");
    }
    if (lanes[lane].predicate) ballot |= std::uint64_t{1} << lane;
  });
  if (first.wait == WarpWait::gather)
    each([&](int lane) { it.given[static_cast<std::size_t>(lane)] = lanes[lane].bits; });
  each([&](int lane) {
    Thread& thread = lanes[lane];
    const bool there = thread.source >= 0 && (taking_part >> thread.source & 1u) != 0;
    thread.result = first.wait == WarpWait::ballot   ? ballot
                    : first.wait == WarpWait::gather ? reinterpret_cast<std::uintptr_t>(it.given.data())
                    : there                          ? lanes[thread.source].bits
                                                     : ~std::uint64_t{0};
  });
  each([&](int lane) { lanes[lane].at = At::ready; });
  it.waiting &= ~taking_part;
}

int Runner::wait_for_block(Barrier kind, bool predicate) {
  Thread& self = threads_[current_];
  self.barrier = kind;
  self.predicate = predicate;
  self.at = At::block;
  stop();
  return static_cast<int>(self.result);
}

/// Every thread has ended or waits. All of them at one barrier go on; anything else is a mistake.
void Runner::release_block() {
  const auto find = [&](auto&& is) -> const Thread* {
    const auto found = std::find_if(threads_.begin(), threads_.end(), is);
    return found == threads_.end() ? nullptr : &*found;
  };
  const auto place = [&](const Thread* thread) {
    return where(static_cast<std::size_t>(thread - threads_.data()));
  };
  if (const Thread* thread = find([](const Thread& t) { return t.at == At::warp; })) {
    throw Fault(place(thread) + " waits in a warp operation that other lanes of its mask never reach");
  }
  if (const Thread* ended = find([](const Thread& t) { return t.at == At::end; })) {
    const Thread* waiting = find([](const Thread& t) { return t.at == At::block; });
    throw Fault(place(waiting) + " waits at __syncthreads, but " + place(ended) + " has ended");
  }
  const Barrier kind = threads_.front().barrier;
  if (const Thread* other = find([kind](const Thread& t) { return t.barrier != kind; })) {
    throw Fault(place(other) + " waits at another kind of __syncthreads than " + place(&threads_.front()));
  }
  const auto count = static_cast<std::size_t>(
      std::count_if(threads_.begin(), threads_.end(), [](const Thread& thread) { return thread.predicate; }));
  const std::uint64_t result = kind == Barrier::count ? count
                               : kind == Barrier::all ? count == threads_.size()
                                                      : count > 0;
  for (Thread& thread : threads_) {
    thread.result = result;
    thread.at = At::ready;
  }
}

/// Unwinds the threads that have begun and not ended.
void Runner::give_up() {
  cancelling_ = true;
  for (std::size_t thread = 0; thread < threads_.size(); ++thread) {
    Thread& it = threads_[thread];
    if (it.at == At::start || it.at == At::end) continue;
    enter(thread);
    fibers_.run(*it.fiber);
  }
  cancelling_ = false;
  error_ = nullptr;
}

void Runner::check_shared() {
  const unsigned char* const guard = static_cast<unsigned char*>(shared()) + grid_->shared_bytes;
  if (std::any_of(guard, guard + kSharedGuard, [](unsigned char byte) { return byte != kGuard; })) {
    throw Fault("a thread of block " + text(blockIdx) + " wrote beyond the dynamic shared memory");
  }
}

std::string Runner::where(std::size_t thread) const {
  return "thread " + text(threads_[thread].index) + " of block " + text(blockIdx);
}

void run(const Grid& grid) {
  if (runner == nullptr) runner = std::make_unique<Runner>();
  running = runner.get();
  struct Leave {
    ~Leave() { running = nullptr; }
  } leave;
  running->run(grid);
}

void* dynamic_shared() { return here().shared(); }
int block_barrier(Barrier kind, bool predicate) { return here().wait_for_block(kind, predicate); }
std::uint64_t warp_exchange(unsigned mask, std::uint64_t bits, int source) {
  return here().wait_for_warp(WarpWait::exchange, mask, bits, source, false);
}
const std::uint64_t* warp_gather(unsigned mask, std::uint64_t bits) {
  return reinterpret_cast<const std::uint64_t*>(here().wait_for_warp(WarpWait::gather, mask, bits, 0, false));
}
unsigned warp_ballot(unsigned mask, bool predicate) {
  return static_cast<unsigned>(here().wait_for_warp(WarpWait::ballot, mask, 0, 0, predicate));
}
void warp_barrier(unsigned mask) { here().wait_for_warp(WarpWait::barrier, mask, 0, 0, false); }
void copy_async(void* to, const void* from, std::size_t bytes, bool zeros) {
  if (!zeros) check_access(from, bytes);
  check_access(to, bytes);
  std::memset(to, 0xff, bytes);
  here().thread().copies.push_back({to, zeros ? nullptr : from, bytes});
}
void commit_copies() { here().thread().groups.push_back(here().thread().copies.size()); }
void await_copies(std::size_t open_groups) {
  Thread& thread = here().thread();
  if (thread.groups.size() <= open_groups) return;
  const auto last = thread.groups.end() - static_cast<std::ptrdiff_t>(open_groups);
  const std::size_t done = last[-1];
  for (std::size_t i = 0; i < done; ++i) {
    const AsyncCopy& copy = thread.copies[i];
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, copy.bytes);
    } else {
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(done));
  thread.groups.erase(thread.groups.begin(), last);
  for (std::size_t& group : thread.groups) group -= done;
}
unsigned live_lanes() { return here().live(); }
int lane() { return here().lane(); }
void trap() { throw Fault("__trap was called"); }

}  // namespace tessera_emulator
