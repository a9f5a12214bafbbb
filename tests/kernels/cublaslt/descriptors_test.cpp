/// What cuBLASLt is told of a product, as far as it can be asked without a GPU. Only in builds with the
/// library.

#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/gemm_cublaslt.hpp"

namespace tessera::kernels::cuda {
namespace {

template <typename T>
T layout_value(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute) {
  T value{};
  std::size_t written = 0;
  EXPECT_EQ(cublasLtMatrixLayoutGetAttribute(layout, attribute, &value, sizeof value, &written),
            CUBLAS_STATUS_SUCCESS);
  return value;
}

template <typename T>
T operation_value(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute) {
  T value{};
  std::size_t written = 0;
  EXPECT_EQ(cublasLtMatmulDescGetAttribute(operation, attribute, &value, sizeof value, &written),
            CUBLAS_STATUS_SUCCESS);
  return value;
}

void expect_layout(cublasLtMatrixLayout_t layout, const ColumnMajor& matrix) {
  EXPECT_EQ(layout_value<std::uint64_t>(layout, CUBLASLT_MATRIX_LAYOUT_ROWS),
            static_cast<std::uint64_t>(matrix.rows));
  EXPECT_EQ(layout_value<std::uint64_t>(layout, CUBLASLT_MATRIX_LAYOUT_COLS),
            static_cast<std::uint64_t>(matrix.cols));
  EXPECT_EQ(layout_value<std::int64_t>(layout, CUBLASLT_MATRIX_LAYOUT_LD), matrix.ld);
  const cudaDataType_t type = matrix.dtype == DType::f32    ? CUDA_R_32F
                              : matrix.dtype == DType::bf16 ? CUDA_R_16BF
                                                            : CUDA_R_16F;
  EXPECT_EQ(layout_value<std::uint32_t>(layout, CUBLASLT_MATRIX_LAYOUT_TYPE),
            static_cast<std::uint32_t>(type));
}

void expect_described(const Product& product) {
  const Descriptors descriptors(product);
  expect_layout(descriptors.first(), product.first);
  expect_layout(descriptors.second(), product.second);
  expect_layout(descriptors.result(), product.result);
  EXPECT_EQ(layout_value<std::int32_t>(descriptors.result(), CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT),
            static_cast<std::int32_t>(product.batch));
  const auto transposition = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const cublasLtMatmulDesc_t operation = descriptors.operation();
  EXPECT_EQ(operation_value<std::int32_t>(operation, CUBLASLT_MATMUL_DESC_TRANSA),
            transposition(product.transpose_first));
  EXPECT_EQ(operation_value<std::int32_t>(operation, CUBLASLT_MATMUL_DESC_TRANSB),
            transposition(product.transpose_second));
  EXPECT_EQ(operation_value<std::int32_t>(operation, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE), CUBLAS_COMPUTE_32F);
  const auto epilogue = operation_value<std::uint32_t>(operation, CUBLASLT_MATMUL_DESC_EPILOGUE);
  if (product.fused.sums) {
    EXPECT_EQ(epilogue, static_cast<std::uint32_t>(CUBLASLT_EPILOGUE_BGRADB));
  } else if (product.fused.dgelu) {
    EXPECT_EQ(epilogue, static_cast<std::uint32_t>(CUBLASLT_EPILOGUE_DGELU));
  } else {
    EXPECT_EQ((epilogue & CUBLASLT_EPILOGUE_BIAS) != 0, product.fused.bias);
    EXPECT_EQ((epilogue & CUBLASLT_EPILOGUE_GELU) != 0, product.fused.gelu);
  }
  // The matrix that gelu's input is written to or read from lies like the result.
  EXPECT_EQ(operation_value<void*>(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER), product.pre);
  EXPECT_EQ(operation_value<std::int64_t>(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD),
            product.pre != nullptr ? product.result.ld : 0);
}

TEST(CublasLt, TakesTheDescriptionOfEveryLayout) {
  std::vector<float> memory(4096);
  for (const DType ab : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType c : {ab, DType::f32}) {
      for (int way = 0; way < 32; ++way) {
        Gemm gemm{.a = memory.data(), .b = memory.data(), .c = memory.data(), .m = 24, .n = 40, .k = 16};
        gemm.trans_a = (way & 1) != 0;
        gemm.trans_b = (way & 2) != 0;
        gemm.beta = (way & 4) != 0 ? 1.0f : 0.0f;
        gemm.bias = (way & 8) != 0 ? memory.data() : nullptr;
        gemm.epilogue = (way & 16) != 0 ? Epilogue::gelu_tanh : Epilogue::none;
        gemm.pre = (way & 16) != 0 ? memory.data() : nullptr;
        gemm.lda = (gemm.trans_a ? gemm.m : gemm.k) + 8;
        gemm.ldb = gemm.trans_b ? gemm.k : gemm.n;
        gemm.ldc = gemm.n + 16;
        gemm.ab_dtype = ab;
        gemm.c_dtype = c;
        SCOPED_TRACE(::testing::Message() << name_of(ab) << " into " << name_of(c) << ", way " << way);
        expect_described(product_of(gemm, choose_fused(gemm)));
      }
    }
  }
}

TEST(CublasLt, TakesTheDescriptionOfGelusGradient) {
  alignas(16) static bfloat16 memory[4096];
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Gemm gemm{.a = memory,
                    .b = memory,
                    .c = memory,
                    .pre = memory + 64,
                    .m = 24,
                    .n = 40,
                    .k = 16,
                    .lda = 16,
                    .ldb = 40,
                    .ldc = 56,
                    .ab_dtype = dtype,
                    .c_dtype = dtype,
                    .epilogue = Epilogue::dgelu_tanh};
    const Product product = product_of(gemm, choose_fused(gemm));
    EXPECT_TRUE(product.fused.dgelu);
    EXPECT_EQ(product.pre, gemm.pre);
    expect_described(product);
  }
}

TEST(CublasLt, TakesTheDescriptionOfColumnSums) {
  alignas(16) static float memory[4096];
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const float sums_beta : {0.0f, 1.0f}) {
      const Gemm gemm{.a = memory,
                      .b = memory,
                      .c = memory,
                      .column_sums = memory + 64,
                      .sums_scratch = memory + 128,
                      .m = 24,
                      .n = 40,
                      .k = 16,
                      .lda = 24,
                      .ldb = 40,
                      .ldc = 40,
                      .trans_a = true,
                      .ab_dtype = dtype,
                      .beta = 1.0f,
                      .sums_beta = sums_beta};
      const Product product = product_of(gemm, choose_fused(gemm));
      EXPECT_TRUE(product.fused.sums);
      expect_described(product);
      const Descriptors descriptors(product);
      const cublasLtMatmulDesc_t operation = descriptors.operation();
      EXPECT_EQ(operation_value<void*>(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER),
                sums_beta == 0.0f ? gemm.column_sums : gemm.sums_scratch);
      EXPECT_EQ(operation_value<std::int32_t>(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE), CUDA_R_32F);
    }
  }
}

TEST(CublasLt, TakesTheDescriptionOfABatch) {
  std::vector<float> memory(4096);
  const BatchedGemm gemm{.a = memory.data(),
                         .b = memory.data(),
                         .c = memory.data(),
                         .m = 5,
                         .n = 7,
                         .k = 3,
                         .lda = 3,
                         .ldb = 9,
                         .ldc = 8,
                         .batch = 6,
                         .stride_a = 15,
                         .stride_b = 27,
                         .stride_c = 40};
  const Product product = product_of(gemm);
  expect_described(product);
  EXPECT_EQ(
      layout_value<std::int64_t>(Descriptors(product).result(), CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET),
      40);
}

}  // namespace
}  // namespace tessera::kernels::cuda
