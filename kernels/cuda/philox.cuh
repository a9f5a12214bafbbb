#pragma once
/// The random words of kernels that run in training steps.

#include "kernels/cuda/common.cuh"
#include "tessera/base/philox.hpp"

namespace tessera::kernels::cuda {

/// tessera::random_block, the step read where RngKey::step_at says. Nothing writes there while a kernel runs,
/// so the compiler may read it once.
__device__ __forceinline__ PhiloxBlock random_words(RngKey key, std::uint64_t block) {
  if (key.step_at != nullptr) key.step = __ldg(key.step_at);
  return random_block(key, block);
}

}  // namespace tessera::kernels::cuda
