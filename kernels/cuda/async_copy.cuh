#pragma once
/// Copies from global to shared memory beside a thread's work (cp.async, compute capability 8.0 on). On GPUs
/// before 8.0 each is made at once.

#include "kernels/cuda/common.cuh"

namespace tessera::kernels::cuda {

/// Starts copying `Bytes` (8 or 16, to which both are aligned) to shared memory, or writes zeros there
/// (`from` is an address that may be read even then).
template <int Bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool zeros = false) {
  static_assert(Bytes == 8 || Bytes == 16);
#if defined(TESSERA_CUDA_EMULATED)
  ::tessera_emulator::copy_async(to, from, Bytes, zeros);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  using Word = detail::Word<Bytes>::type;
  *static_cast<Word*>(to) = zeros ? Word{} : *static_cast<const Word*>(from);
#else
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int count = zeros ? 0 : Bytes;
  if constexpr (Bytes == 16) {  // past the first cache, which keeps nothing of it
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(count)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(from), "r"(count)
                 : "memory");
  }
#endif
}

/// What was started since the last call belongs together.
__device__ __forceinline__ void commit_copies() {
#if defined(TESSERA_CUDA_EMULATED)
  ::tessera_emulator::commit_copies();
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits for this thread's copies but those of the `Open` groups committed last; a barrier makes others'
/// known.
template <int Open>
__device__ __forceinline__ void await_copies() {
#if defined(TESSERA_CUDA_EMULATED)
  ::tessera_emulator::await_copies(Open);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Open) : "memory");
#endif
}

}  // namespace tessera::kernels::cuda
