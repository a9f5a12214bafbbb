#pragma once
/// A Product in the words of cuBLASLt: descriptors, candidates, the call. No state.

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "kernels/cuda/gemm_plan.hpp"

namespace tessera::kernels::cuda {

/// Throw DeviceError naming the call, its status and, where there is one, the product.
void check_library(cublasStatus_t status, const char* call, const std::optional<Product>& product);
void check_runtime(cudaError_t code, const char* call, const std::optional<Product>& product);

/// Descriptions of the operation and of its matrices, which live here and not on the heap: making them for
/// every call costs less than sharing them among threads would, as they hold the pointers of bias and pre.
class Descriptors {
 public:
  /// Throws DeviceError if cuBLASLt refuses a description.
  explicit Descriptors(const Product& product);
  cublasLtMatmulDesc_t operation() const { return &operation_; }
  cublasLtMatrixLayout_t first() const { return &first_; }
  cublasLtMatrixLayout_t second() const { return &second_; }
  cublasLtMatrixLayout_t result() const { return &result_; }

 private:
  // The library takes pointers without const; it does not write.
  mutable cublasLtMatmulDescOpaque_t operation_{};
  mutable cublasLtMatrixLayoutOpaque_t first_{}, second_{}, result_{};
};

/// How an algorithm may add up shares of k, in fp32 and in a fixed order: beside the result, or, where that
/// is fp32, one share after the other in it, which writes nothing else to memory.
std::vector<cublasLtReductionScheme_t> reduction_schemes(const Product& product);

/// Up to `most` algorithms for the problem, the one cuBLASLt thinks best first; none if it has none. Sums are
/// kept in fp32 to the end, also where an algorithm shares them out over k, and in a fixed order.
std::vector<cublasLtMatmulAlgo_t> candidates_for(cublasLtHandle_t handle, const Descriptors& descriptors,
                                                 const Product& product, std::size_t workspace_bytes,
                                                 int most);

/// Whether the algorithm can solve the problem on the current device with this much workspace.
bool accepts(cublasLtHandle_t handle, const Descriptors& descriptors, const cublasLtMatmulAlgo_t& algorithm,
             std::size_t workspace_bytes);

cublasStatus_t multiply(cublasLtHandle_t handle, const Descriptors& descriptors, const Product& product,
                        const cublasLtMatmulAlgo_t& algorithm, void* workspace, std::size_t workspace_bytes,
                        cudaStream_t stream);

}  // namespace tessera::kernels::cuda
