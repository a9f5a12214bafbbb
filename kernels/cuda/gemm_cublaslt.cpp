#include "kernels/cuda/gemm_cublaslt.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

[[noreturn]] void fail(const char* call, const std::string& status, const std::optional<Product>& product) {
  throw DeviceError(tessera::detail::concat(call, " failed: ", status,
                                            product ? " (" + describe_product(*product) + ")" : ""));
}

cudaDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

cublasLtEpilogue_t epilogue_of(const Fused& fused) {
  if (fused.sums) return CUBLASLT_EPILOGUE_BGRADB;  // of the second operand, over what is multiplied out
  if (fused.dgelu) return CUBLASLT_EPILOGUE_DGELU;
  if (fused.gelu && fused.pre)
    return fused.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  if (fused.gelu) return fused.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
  return fused.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

void describe_matrix(cublasLtMatrixLayoutOpaque_t& layout, const ColumnMajor& matrix, const Product& p) {
  check_library(
      cublasLtMatrixLayoutInit(&layout, type_of(matrix.dtype), static_cast<std::uint64_t>(matrix.rows),
                               static_cast<std::uint64_t>(matrix.cols), matrix.ld),
      "cublasLtMatrixLayoutInit", p);
  if (p.batch == 1) return;
  const auto batch = static_cast<std::int32_t>(p.batch);
  const auto set = [&](cublasLtMatrixLayoutAttribute_t what, const auto& value) {
    check_library(cublasLtMatrixLayoutSetAttribute(&layout, what, &value, sizeof value),
                  "cublasLtMatrixLayoutSetAttribute", p);
  };
  set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch);
  set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrix.stride);
}

}  // namespace

void check_library(cublasStatus_t status, const char* call, const std::optional<Product>& product) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(call,
       tessera::detail::concat(cublasLtGetStatusString(status), " (", cublasLtGetStatusName(status), ")"),
       product);
}

void check_runtime(cudaError_t code, const char* call, const std::optional<Product>& product) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps the last error until it is read
  fail(call, tessera::detail::concat(cudaGetErrorString(code), " (", cudaGetErrorName(code), ")"), product);
}

Descriptors::Descriptors(const Product& p) {
  TESSERA_CHECK(p.batch >= 1 && p.batch <= INT32_MAX, "a batch of ", p.batch, " products");
  // fp32 stays fp32: TF32 has a compute type of its own.
  check_library(cublasLtMatmulDescInit(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit",
                p);
  const auto set = [&](cublasLtMatmulDescAttributes_t what, const auto& value) {
    check_library(cublasLtMatmulDescSetAttribute(&operation_, what, &value, sizeof value),
                  "cublasLtMatmulDescSetAttribute", p);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_first ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_second ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.fused.any()) set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p.fused));
  if (p.fused.bias || p.fused.sums) {
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(type_of(p.result.dtype)));
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.fused.sums ? p.sums : p.bias);
  }
  if (p.pre != nullptr) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.pre);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.result.ld);
  }
  if (p.scales.first != nullptr) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.scales.first);
  if (p.scales.second != nullptr) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.scales.second);
  if (p.scales.result != nullptr) set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, p.scales.result);
  describe_matrix(first_, p.first, p);
  describe_matrix(second_, p.second, p);
  describe_matrix(result_, p.result, p);
}

std::vector<cublasLtReductionScheme_t> reduction_schemes(const Product& p) {
  if (p.result.dtype != DType::f32) return {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
  return {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_INPLACE};
}

std::vector<cublasLtMatmulAlgo_t> candidates_for(cublasLtHandle_t handle, const Descriptors& descriptors,
                                                 const Product& p, std::size_t workspace_bytes, int most) {
  cublasLtMatmulPreferenceOpaque_t preference{};
  check_library(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit", p);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
    check_library(cublasLtMatmulPreferenceSetAttribute(&preference, what, &value, sizeof value),
                  "cublasLtMatmulPreferenceSetAttribute", p);
  };
  const auto alignment = [](const void* data) { return static_cast<std::uint32_t>(detail::alignment(data)); };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  std::uint32_t schemes = 0;
  for (const cublasLtReductionScheme_t scheme : reduction_schemes(p)) schemes |= scheme;
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.first.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.second.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.result.data));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.result.data));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(most));
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, descriptors.operation(), descriptors.first(), descriptors.second(), descriptors.result(),
      descriptors.result(), &preference, most, results.data(), &found);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  // "Not supported" is an answer: the caller has another way. So is the refusal of what is to be fused.
  const bool refused = p.fused.any() && status == CUBLAS_STATUS_INVALID_VALUE;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || refused) return algorithms;
  check_library(status, "cublasLtMatmulAlgoGetHeuristic", p);
  for (int i = 0; i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<std::size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(result.algo);
  }
  return algorithms;
}

bool accepts(cublasLtHandle_t handle, const Descriptors& descriptors, const cublasLtMatmulAlgo_t& algorithm,
             std::size_t workspace_bytes) {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status =
      cublasLtMatmulAlgoCheck(handle, descriptors.operation(), descriptors.first(), descriptors.second(),
                              descriptors.result(), descriptors.result(), &algorithm, &result);
  return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= workspace_bytes;
}

cublasStatus_t multiply(cublasLtHandle_t handle, const Descriptors& descriptors, const Product& p,
                        const cublasLtMatmulAlgo_t& algorithm, void* workspace, std::size_t workspace_bytes,
                        cudaStream_t stream) {
  return cublasLtMatmul(handle, descriptors.operation(), &p.alpha, p.first.data, descriptors.first(),
                        p.second.data, descriptors.second(), &p.beta, p.result.data, descriptors.result(),
                        const_cast<void*>(p.result.data), descriptors.result(), &algorithm, workspace,
                        workspace_bytes, stream);
}

}  // namespace tessera::kernels::cuda
