#pragma once
/// How long products take on the device.

#include <cuda_runtime.h>

#include "kernels/cuda/gemm_cublaslt.hpp"

namespace tessera::kernels::cuda {

class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    check_runtime(cudaEventCreate(&begin_), "cudaEventCreate", {});
    check_runtime(cudaEventCreate(&end_), "cudaEventCreate", {});
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }
  /// Of one of `runs` in a row.
  template <typename Run>
  double seconds(int runs, Run&& run) const {
    check_runtime(cudaEventRecord(begin_, stream_), "cudaEventRecord", {});
    for (int i = 0; i < runs; ++i) run();
    check_runtime(cudaEventRecord(end_, stream_), "cudaEventRecord", {});
    check_runtime(cudaEventSynchronize(end_), "cudaEventSynchronize", {});
    float milliseconds = 0.0f;
    check_runtime(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime", {});
    return 1e-3 * static_cast<double>(milliseconds) / runs;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace tessera::kernels::cuda
