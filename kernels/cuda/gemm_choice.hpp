#pragma once
/// What gemm.cpp lets a search (gemm_tune.cpp) see and decide, of the current device.

#include <cublasLt.h>

#include <cstddef>

#include "kernels/api/launch.hpp"
#include "kernels/cuda/gemm_plan.hpp"

namespace tessera::kernels::cuda {

struct LtDevice {
  cublasLtHandle_t handle = nullptr;
  std::size_t workspace_bytes = 0;  ///< that a product may use
};
LtDevice lt_device();

/// Whether the tuner's file has the outcome of a search for such products.
bool is_tuned(const GemmTuner& tuner, const Product& product);
/// Solves such products by `algorithm` from now on; null: what they fuse is left to a pass of its own.
void use_algorithm(GemmTuner& tuner, const Product& product, const cublasLtMatmulAlgo_t* algorithm);
/// The same, and remembers it as the fastest, in the file at once.
void keep_algorithm(GemmTuner& tuner, const Product& product, const cublasLtMatmulAlgo_t* algorithm);

}  // namespace tessera::kernels::cuda
