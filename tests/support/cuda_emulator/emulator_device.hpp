#pragma once
/// What threads of a block do together, and atomics.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator_types.hpp"

namespace tessera_emulator {

/// The block's dynamic shared memory.
void* dynamic_shared();
/// Throws Fault unless `address` is aligned to `bytes` and, if it is device memory, the access lies in one
/// allocation.
void check_access(const void* address, std::size_t bytes);
[[noreturn]] void trap();

/// Waits for all threads of the block, which must all come to the same kind of barrier; how many had
/// `predicate` set.
enum class Barrier : std::uint8_t { plain, count, all, any };
int block_barrier(Barrier kind, bool predicate);

/// Waits for the lanes of `mask` that have not ended. The bits of the value lane `source` gave; all ones if
/// that lane takes no part.
std::uint64_t warp_exchange(unsigned mask, std::uint64_t bits, int source);
/// Waits likewise; what each lane gave, until the warp's next operation.
const std::uint64_t* warp_gather(unsigned mask, std::uint64_t bits);
/// Waits likewise; the lanes whose predicate is set.
unsigned warp_ballot(unsigned mask, bool predicate);
void warp_barrier(unsigned mask);
/// Lanes of this warp that have not ended.
unsigned live_lanes();
int lane();

/// `source` of a lane, given the lane's segment of `width` lanes; the lane itself when the source lies
/// outside.
template <typename T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_exchange(mask, bits, source);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T, typename Change>
T atomic_update(T* address, Change change) {
  std::atomic_ref<T> target(*address);
  T old = target.load();
  while (!target.compare_exchange_weak(old, change(old))) {
  }
  return old;
}

}  // namespace tessera_emulator

inline void __syncthreads() { tessera_emulator::block_barrier(tessera_emulator::Barrier::plain, false); }
inline int __syncthreads_count(int predicate) {
  return tessera_emulator::block_barrier(tessera_emulator::Barrier::count, predicate != 0);
}
inline int __syncthreads_and(int predicate) {
  return tessera_emulator::block_barrier(tessera_emulator::Barrier::all, predicate != 0);
}
inline int __syncthreads_or(int predicate) {
  return tessera_emulator::block_barrier(tessera_emulator::Barrier::any, predicate != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { tessera_emulator::warp_barrier(mask); }
inline unsigned __activemask() { return tessera_emulator::live_lanes(); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return tessera_emulator::warp_ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int segment = tessera_emulator::lane() / width * width;
  return tessera_emulator::shuffle(mask, value, segment + (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = tessera_emulator::lane(), source = lane ^ lane_mask;
  return tessera_emulator::shuffle(mask, value, source < (lane / width + 1) * width ? source : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = tessera_emulator::lane(), source = lane + static_cast<int>(delta);
  return tessera_emulator::shuffle(mask, value, source < (lane / width + 1) * width ? source : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = tessera_emulator::lane(), source = lane - static_cast<int>(delta);
  return tessera_emulator::shuffle(mask, value, source >= lane / width * width ? source : lane);
}

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return tessera_emulator::atomic_update(address, [value](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return tessera_emulator::atomic_update(address, [value](T old) { return static_cast<T>(old - value); });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return tessera_emulator::atomic_update(address, [value](T old) { return old < value ? value : old; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return tessera_emulator::atomic_update(address, [value](T old) { return value < old ? value : old; });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return tessera_emulator::atomic_update(address, [value](T old) { return old | value; });
}
template <typename T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return tessera_emulator::atomic_update(address, [value](T old) { return old & value; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).exchange(value);
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  std::atomic_ref<T>(*address).compare_exchange_strong(compare, value);
  return compare;
}
/// Counts up to `limit`, then begins again at 0.
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return tessera_emulator::atomic_update(address,
                                         [limit](unsigned old) { return old >= limit ? 0u : old + 1u; });
}

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
[[noreturn]] inline void __trap() { tessera_emulator::trap(); }

// Loads and stores with a caching hint, checked as those of common.cuh are.
#define TESSERA_EMULATED_LOAD(name)                     \
  template <typename T>                                 \
  T name(const T* address) {                            \
    tessera_emulator::check_access(address, sizeof(T)); \
    return *address;                                    \
  }
#define TESSERA_EMULATED_STORE(name)                     \
  template <typename T>                                  \
  void name(T* address, std::type_identity_t<T> value) { \
    tessera_emulator::check_access(address, sizeof(T));  \
    *address = value;                                    \
  }
TESSERA_EMULATED_LOAD(__ldg)
TESSERA_EMULATED_LOAD(__ldca)
TESSERA_EMULATED_LOAD(__ldcg)
TESSERA_EMULATED_LOAD(__ldcs)
TESSERA_EMULATED_LOAD(__ldlu)
TESSERA_EMULATED_LOAD(__ldcv)
TESSERA_EMULATED_STORE(__stwb)
TESSERA_EMULATED_STORE(__stcg)
TESSERA_EMULATED_STORE(__stcs)
TESSERA_EMULATED_STORE(__stwt)
#undef TESSERA_EMULATED_LOAD
#undef TESSERA_EMULATED_STORE
