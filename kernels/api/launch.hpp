#pragma once
/// Every kernel family declares, side by side, a POD parameter struct and one launcher per device. Pointers
/// are raw, sizes are elements, nothing allocates; scratch is passed in. The caller (ops/) has validated
/// everything.

namespace tessera {
class GemmTuner;
}

namespace tessera::kernels {

/// Where and how wide a kernel runs.
struct Launch {
  void* stream = nullptr;  ///< cudaStream_t; unused on the CPU
  int threads = 1;         ///< CPU threads; unused on CUDA
  /// CPU threads that products are cut for: where a library makes them, their sums depend on it; 0 = threads.
  int gemm_threads = 0;
  /// How products on CUDA choose their algorithms; null: cuBLASLt's first suggestions.
  GemmTuner* gemm_tuner = nullptr;
};

}  // namespace tessera::kernels

/// Declares launcher `name(const Params&, const Launch&)` for both devices.
#define TESSERA_DECLARE_KERNEL(name, Params)             \
  namespace tessera::kernels::cpu {                      \
  void name(const Params& params, const Launch& launch); \
  }                                                      \
  namespace tessera::kernels::cuda {                     \
  void name(const Params& params, const Launch& launch); \
  }
