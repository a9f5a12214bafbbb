#pragma once
/// The arithmetic of a matrix product that needs no device: our row-major problem as the column-major one
/// that cuBLASLt solves, what its epilogue can take over, and the key under which a choice of algorithm is
/// kept. Header only and free of CUDA, so that it is tested in every build.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/api/gemm.hpp"
#include "kernels/cuda/gemm.hpp"
#include "kernels/cuda/gemm_finish.hpp"
#include "tessera/base/dtype.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {

/// A column-major matrix as it is stored: element (r, c) at data[r + c * ld]. `stride` elements to the next
/// of a batch.
struct ColumnMajor {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, ld = 0, stride = 0;
};

/// What the product itself does beyond multiplying; the rest is one pass over C afterwards.
struct Fused {
  bool bias = false;   ///< adds the bias
  bool gelu = false;   ///< applies gelu_tanh
  bool pre = false;    ///< writes what gelu is applied to
  bool dgelu = false;  ///< multiplies by the slope of gelu_tanh at pre
  bool sums = false;   ///< writes the column sums
  bool any() const { return bias || gelu || pre || dgelu || sums; }
  bool operator==(const Fused&) const = default;
};

/// Scales of 8-bit operands, one float per matrix on the device: op(A) stands for scale * stored values. For
/// products of float8 operands, which `Gemm` cannot describe yet: null means that there is no scale.
struct Scales {
  const float* first = nullptr;
  const float* second = nullptr;
  const float* result = nullptr;
};

/// result[n, m] = act(alpha op(first)[n, k] op(second)[k, m] + beta result + bias along the rows), all
/// column-major: the transpose of our product, with our B as the first operand.
struct Product {
  ColumnMajor first, second, result;
  bool transpose_first = false, transpose_second = false;
  std::int64_t inner = 0, batch = 1;
  float alpha = 1.0f, beta = 0.0f;
  Fused fused;
  const void* bias = nullptr;  ///< [result.rows], of result's dtype
  void* pre = nullptr;         ///< as result; read with dgelu
  float* sums = nullptr;       ///< [result.cols], sums of op(second) over `inner`; overwritten
  Scales scales;
};

namespace detail {

/// A matrix stored row-major is its transpose stored column-major. A leading dimension that no element
/// depends on may be too small for cuBLASLt's checks.
inline ColumnMajor stored(const void* data, DType dtype, std::int64_t row_major_rows,
                          std::int64_t row_major_cols, std::int64_t ld, std::int64_t stride = 0) {
  return {data, dtype, row_major_cols, row_major_rows, std::max(ld, row_major_cols), stride};
}

inline bool aligned(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

/// Largest power of two up to 16 that divides an address: no access is wider.
inline std::int64_t alignment(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p) | 16u;
  return static_cast<std::int64_t>(address & (~address + 1u));
}

}  // namespace detail

/// Refuses what cuBLASLt has no product for. Errors: InvalidArgument naming the dtypes.
inline void check_dtypes(DType ab, DType c) {
  const bool operands = ab == DType::f32 || ab == DType::bf16 || ab == DType::f16;
  TESSERA_CHECK(operands && (c == ab || c == DType::f32), "a product of ", ab, " operands into ", c,
                " is not offered on CUDA: the result must have the operands' dtype or float32");
}

/// Where an epilogue puts the column sums, which it overwrites: beside those it has to be added to.
inline float* sums_target(const Gemm& g) { return g.sums_beta == 0.0f ? g.column_sums : g.sums_scratch; }

/// What cuBLASLt's epilogue can do for `g`. It reads a bias of the result's dtype only, knows gelu in the
/// tanh form only, and takes the values before it where their columns start at multiples of 16 bytes and
/// their leading dimension is a multiple of 8. How exact its gelu is, is written nowhere; float32 has to give
/// the same on every layout and device to 1e-5, so there our own pass does it. The same holds for its sums,
/// which are of the result's dtype.
inline Fused choose_fused(const Gemm& g) {
  Fused fused;
  fused.bias = g.bias != nullptr && g.ab_dtype == g.c_dtype && detail::aligned(g.bias, 16);
  const bool bias_done = g.bias == nullptr || fused.bias;
  const bool pre_fits = g.pre == nullptr || (detail::aligned(g.pre, 16) && g.ldc % 8 == 0);
  const bool activates = g.c_dtype != DType::f32 && bias_done && pre_fits;
  fused.gelu = activates && g.epilogue == Epilogue::gelu_tanh;
  fused.pre = fused.gelu && g.pre != nullptr;
  fused.dgelu = activates && g.epilogue == Epilogue::dgelu_tanh;
  fused.sums = g.column_sums != nullptr && g.ab_dtype != DType::f32 && g.c_dtype == DType::f32 &&
               detail::aligned(sums_target(g), 16);
  return fused;
}

/// Whether a pass over C has to follow the product.
inline bool needs_finish(const Gemm& g, const Fused& fused) {
  const bool activated = fused.gelu || fused.dgelu;
  return (g.bias != nullptr && !fused.bias) || (g.epilogue != Epilogue::none && !activated);
}

/// Where the product goes: to `pre` if it is wanted and a pass has to make C of it, which then reads one
/// matrix and writes one.
inline void* product_target(const Gemm& g, const Fused& fused) {
  const bool activated_after = g.epilogue != Epilogue::none && !is_gradient(g.epilogue) && !fused.gelu;
  return activated_after && g.pre != nullptr && g.beta == 0.0f ? g.pre : g.c;
}

/// The pass after the product, or in its place if there is nothing to multiply.
inline GemmFinish finish_of(const Gemm& g, const Fused& fused) {
  const bool clear = g.k == 0 && g.beta == 0.0f, bias_done = g.bias == nullptr || fused.bias;
  void* const product = product_target(g, fused);
  const bool pre_done = product == g.pre && bias_done && !clear;
  return {.product = product,
          .c = g.c,
          .bias = fused.bias ? nullptr : g.bias,
          .pre = pre_done ? nullptr : g.pre,
          .m = g.m,
          .n = g.n,
          .ldc = g.ldc,
          .c_dtype = g.c_dtype,
          .bias_dtype = g.ab_dtype,
          .epilogue = g.epilogue,
          .clear = clear};
}

inline Product product_of(const Gemm& g, const Fused& fused) {
  Product p;
  p.first = g.trans_b ? detail::stored(g.b, g.ab_dtype, g.n, g.k, g.ldb)
                      : detail::stored(g.b, g.ab_dtype, g.k, g.n, g.ldb);
  p.second = g.trans_a ? detail::stored(g.a, g.ab_dtype, g.k, g.m, g.lda)
                       : detail::stored(g.a, g.ab_dtype, g.m, g.k, g.lda);
  p.result = detail::stored(product_target(g, fused), g.c_dtype, g.m, g.n, g.ldc);
  p.transpose_first = g.trans_b;
  p.transpose_second = g.trans_a;
  p.inner = g.k;
  p.beta = g.beta;
  p.fused = fused;
  if (fused.bias) p.bias = g.bias;
  if (fused.pre || fused.dgelu) p.pre = g.pre;
  if (fused.sums) p.sums = sums_target(g);
  return p;
}

inline Product product_of(const BatchedGemm& g) {
  const Gemm one{.a = g.a,
                 .b = g.b,
                 .c = g.c,
                 .m = g.m,
                 .n = g.n,
                 .k = g.k,
                 .lda = g.lda,
                 .ldb = g.ldb,
                 .ldc = g.ldc,
                 .trans_a = g.trans_a,
                 .trans_b = g.trans_b,
                 .ab_dtype = g.ab_dtype,
                 .c_dtype = g.c_dtype,
                 .beta = g.beta};
  Product p = product_of(one, {});
  p.alpha = g.alpha;
  p.batch = g.batch;
  p.first.stride = g.stride_b;
  p.second.stride = g.stride_a;
  p.result.stride = g.stride_c;
  return p;
}

/// Everything an algorithm's fitness depends on, except the device and the library: sizes, leading
/// dimensions, strides, dtypes, alignments, and what is fused. Equal keys may share an algorithm.
struct ProductKey {
  std::array<std::int64_t, 11> words{};
  bool operator==(const ProductKey&) const = default;

  /// The words, separated by commas.
  std::string text() const {
    std::string all;
    for (const std::int64_t word : words) {
      if (!all.empty()) all += ',';
      all += std::to_string(word);
    }
    return all;
  }
};

struct ProductKeyHash {
  std::size_t operator()(const ProductKey& key) const {
    std::uint64_t hash = 0;
    for (const std::int64_t word : key.words) {
      hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return static_cast<std::size_t>(hash);
  }
};

inline ProductKey key_of(const Product& p) {
  std::int64_t flags = 0;
  const auto add = [&flags](std::int64_t value, int bits) { flags = (flags << bits) | value; };
  add(p.fused.sums, 1);
  add(p.fused.dgelu, 1);
  add(p.transpose_first, 1);
  add(p.transpose_second, 1);
  add(static_cast<std::int64_t>(p.first.dtype), 4);
  add(static_cast<std::int64_t>(p.second.dtype), 4);
  add(static_cast<std::int64_t>(p.result.dtype), 4);
  add(p.beta != 0.0f, 1);
  add(p.fused.bias, 1);
  add(p.fused.gelu, 1);
  add(p.fused.pre, 1);
  for (const float* scale : {p.scales.first, p.scales.second, p.scales.result}) add(scale != nullptr, 1);
  for (const void* data : {p.first.data, p.second.data, p.result.data})
    add(std::countr_zero(static_cast<std::uint64_t>(detail::alignment(data))), 3);
  return {{p.result.rows, p.result.cols, p.inner, p.first.ld, p.second.ld, p.result.ld, p.batch,
           p.first.stride, p.second.stride, p.result.stride, flags}};
}

/// Elements from the first to the last of a matrix or of a whole batch.
inline std::int64_t extent(const ColumnMajor& matrix, std::int64_t batch) {
  return (batch - 1) * matrix.stride + (matrix.cols - 1) * matrix.ld + matrix.rows;
}

/// "A[m,k] x B[k,n]" with dtypes and options, for messages.
inline std::string describe_product(const Product& p) {
  return tessera::detail::concat(
      "product of ", p.result.cols, "x", p.inner, p.transpose_second ? " (transposed)" : "", " by ", p.inner,
      "x", p.result.rows, p.transpose_first ? " (transposed)" : "", ", ", p.first.dtype, " into ",
      p.result.dtype, ", leading dimensions ", p.second.ld, ", ", p.first.ld, ", ", p.result.ld, ", beta ",
      p.beta, p.batch > 1 ? tessera::detail::concat(", batch of ", p.batch) : "",
      p.fused.bias ? ", with bias" : "", p.fused.gelu ? ", with gelu" : "",
      p.fused.pre ? " and its input" : "", p.fused.dgelu ? ", with gelu's gradient" : "",
      p.fused.sums ? ", with column sums" : "");
}

}  // namespace tessera::kernels::cuda
