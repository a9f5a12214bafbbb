/// What the CUDA products decide before they call the library: the column-major form of a row-major problem,
/// run here by a plain column-major multiplication; what is fused; which problems share an algorithm.

#include "kernels/cuda/gemm_plan.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::kernels::cuda {
namespace {

using Floats = std::vector<float>;

Floats numbers(std::int64_t count, int seed) {
  Floats values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((static_cast<int>(i) * 37 + seed * 101) % 23 - 11);
  return values;
}

/// Element (r, c) of op(matrix).
float element(const ColumnMajor& matrix, bool transposed, std::int64_t r, std::int64_t c,
              std::int64_t batch) {
  if (transposed) std::swap(r, c);
  EXPECT_LT(r, matrix.rows);
  EXPECT_LT(c, matrix.cols);
  return static_cast<const float*>(matrix.data)[batch * matrix.stride + r + c * matrix.ld];
}

/// What the library does with a Product of floats.
void multiply_column_major(const Product& p) {
  auto* result = static_cast<float*>(const_cast<void*>(p.result.data));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t r = 0; r < p.result.rows; ++r) {
      for (std::int64_t c = 0; c < p.result.cols; ++c) {
        float sum = 0.0f;
        for (std::int64_t i = 0; i < p.inner; ++i)
          sum +=
              element(p.first, p.transpose_first, r, i, b) * element(p.second, p.transpose_second, i, c, b);
        float& target = result[b * p.result.stride + r + c * p.result.ld];
        target = p.alpha * sum + (p.beta == 0.0f ? 0.0f : p.beta * target);
        if (p.fused.bias) target += static_cast<const float*>(p.bias)[r];
        if (p.fused.pre) static_cast<float*>(p.pre)[r + c * p.result.ld] = target;
        if (p.fused.dgelu) target *= static_cast<const float*>(p.pre)[r + c * p.result.ld];
      }
    }
    for (std::int64_t c = 0; p.fused.sums && c < p.result.cols; ++c) {
      p.sums[c] = 0.0f;
      for (std::int64_t i = 0; i < p.inner; ++i) p.sums[c] += element(p.second, p.transpose_second, i, c, b);
    }
  }
}

struct Sizes {
  std::int64_t m, n, k;
};
constexpr Sizes kSizes[] = {{1, 1, 1}, {3, 5, 7}, {4, 1, 6}, {1, 6, 2}, {8, 16, 4}};

/// beta C + op(A) op(B) + bias by the definition in kernels/api/gemm.hpp.
float row_major(const Gemm& g, const Floats& c, std::int64_t i, std::int64_t j) {
  const auto* a = static_cast<const float*>(g.a);
  const auto* b = static_cast<const float*>(g.b);
  float sum = 0.0f;
  for (std::int64_t x = 0; x < g.k; ++x)
    sum += a[g.trans_a ? x * g.lda + i : i * g.lda + x] * b[g.trans_b ? j * g.ldb + x : x * g.ldb + j];
  if (g.beta != 0.0f) sum += g.beta * c[static_cast<std::size_t>(i * g.ldc + j)];
  return sum + (g.bias == nullptr ? 0.0f : static_cast<const float*>(g.bias)[j]);
}

/// One problem in every way to lay it out: 4 bits of `way` are transpositions, beta and bias.
void check_layout(const Sizes& size, std::int64_t pad, int way) {
  const bool trans_a = (way & 1) != 0, trans_b = (way & 2) != 0, bias = (way & 8) != 0;
  const auto [m, n, k] = size;
  const std::int64_t lda = (trans_a ? m : k) + pad, ldb = (trans_b ? k : n) + 2 * pad, ldc = n + 3 * pad;
  const Floats a = numbers((trans_a ? k : m) * lda, 1), b = numbers((trans_b ? n : k) * ldb, 2),
               biases = numbers(n, 3), before = numbers(m * ldc, 4);
  Floats c = before, pre(before.size(), -99.0f);
  const Gemm g{.a = a.data(),
               .b = b.data(),
               .c = c.data(),
               .bias = bias ? biases.data() : nullptr,
               .pre = pre.data(),
               .m = m,
               .n = n,
               .k = k,
               .lda = lda,
               .ldb = ldb,
               .ldc = ldc,
               .trans_a = trans_a,
               .trans_b = trans_b,
               .beta = (way & 4) != 0 ? 1.0f : 0.0f};
  const Product p = product_of(g, {.bias = bias, .gelu = true, .pre = true});
  EXPECT_GE(p.first.ld, p.first.rows);
  EXPECT_GE(p.second.ld, p.second.rows);
  EXPECT_GE(p.result.ld, p.result.rows);
  EXPECT_EQ(extent(p.result, 1), (m - 1) * ldc + n);
  multiply_column_major(p);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < ldc; ++j) {
      const auto at = static_cast<std::size_t>(i * ldc + j);
      const float want = j < n ? row_major(g, before, i, j) : before[at];
      ASSERT_EQ(c[at], want) << i << ", " << j;
      ASSERT_EQ(pre[at], j < n ? want : -99.0f) << i << ", " << j;
    }
  }
}

TEST(CudaGemmPlan, TurnsRowMajorIntoColumnMajor) {
  for (const Sizes& size : kSizes) {
    for (const std::int64_t pad : {0, 1, 3}) {
      for (int way = 0; way < 16; ++way) {
        SCOPED_TRACE(::testing::Message()
                     << size.m << "x" << size.n << "x" << size.k << " pad " << pad << " way " << way);
        check_layout(size, pad, way);
      }
    }
  }
}

TEST(CudaGemmPlan, BatchesWithStrides) {
  const std::int64_t m = 3, n = 4, k = 5, batch = 3;
  for (int way = 0; way < 4; ++way) {
    const bool trans_a = (way & 1) != 0, trans_b = (way & 2) != 0;
    const Floats a = numbers(batch * (m * k + 2), 1), b = numbers(n * k, 2),
                 before = numbers(batch * m * n, 3);
    Floats c = before;
    BatchedGemm g{.a = a.data(),
                  .b = b.data(),
                  .c = c.data(),
                  .m = m,
                  .n = n,
                  .k = k,
                  .lda = trans_a ? m : k,
                  .ldb = trans_b ? k : n,
                  .ldc = n,
                  .trans_a = trans_a,
                  .trans_b = trans_b,
                  .alpha = 0.5f,
                  .beta = 2.0f,
                  .batch = batch,
                  .stride_a = m * k + 2,
                  .stride_b = 0,
                  .stride_c = m * n};
    multiply_column_major(product_of(g));
    for (std::int64_t i = 0; i < batch * m * n; ++i) {
      const std::int64_t one = i / (m * n), row = i / n % m, column = i % n;
      const Gemm plain{.a = a.data() + one * g.stride_a,
                       .b = b.data(),
                       .m = m,
                       .n = n,
                       .k = k,
                       .lda = g.lda,
                       .ldb = g.ldb,
                       .ldc = n,
                       .trans_a = trans_a,
                       .trans_b = trans_b};
      const auto at = static_cast<std::size_t>(i);
      EXPECT_EQ(c[at], 0.5f * row_major(plain, {}, row, column) + 2.0f * before[at]);
    }
  }
}

// The slope's place: element by element beside the result. Here it is the factor itself.
TEST(CudaGemmPlan, ReadsWhatAGradientNeedsWhereTheResultIs) {
  const std::int64_t m = 3, n = 5, k = 4, ld = 8;
  const Floats a = numbers(m * k, 1), b = numbers(k * n, 2), slopes = numbers(m * ld, 3);
  Floats c(static_cast<std::size_t>(m * ld), -99.0f), factors = slopes;
  const Gemm g{.a = a.data(),
               .b = b.data(),
               .c = c.data(),
               .pre = factors.data(),
               .m = m,
               .n = n,
               .k = k,
               .lda = k,
               .ldb = n,
               .ldc = ld,
               .epilogue = Epilogue::dgelu_tanh};
  multiply_column_major(product_of(g, {.dgelu = true}));
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < ld; ++j) {
      const auto at = static_cast<std::size_t>(i * ld + j);
      ASSERT_EQ(c[at], j < n ? row_major(g, {}, i, j) * slopes[at] : -99.0f) << i << ", " << j;
    }
  }
  EXPECT_EQ(factors, slopes);
}

/// A weight gradient with a bias gradient that begins at 0 or is added to.
struct SumsProblem {
  static constexpr std::int64_t kRows = 6, kOut = 5, kIn = 3, kLd = 7;
  Floats dy = numbers(kRows * kLd, 1), x = numbers(kRows * kIn, 2), dw = Floats(kOut * kIn),
         sums = numbers(kOut, 3), scratch = Floats(kReduceParts * kOut, -99.0f);

  Gemm gemm(float sums_beta) {
    return {.a = dy.data(),
            .b = x.data(),
            .c = dw.data(),
            .column_sums = sums.data(),
            .sums_scratch = scratch.data(),
            .m = kOut,
            .n = kIn,
            .k = kRows,
            .lda = kLd,
            .ldb = kIn,
            .ldc = kIn,
            .trans_a = true,
            .sums_beta = sums_beta};
  }
  float sum(std::int64_t column) const {
    float total = 0.0f;
    for (std::int64_t row = 0; row < kRows; ++row) total += dy[static_cast<std::size_t>(row * kLd + column)];
    return total;
  }
};

TEST(CudaGemmPlan, SumsGoBesideThoseTheyAreAddedTo) {
  for (const float beta : {0.0f, 1.0f}) {
    SumsProblem problem;
    const Floats before = problem.sums;
    multiply_column_major(product_of(problem.gemm(beta), {.sums = true}));
    for (std::int64_t i = 0; i < SumsProblem::kOut; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_EQ(problem.sums[at], beta == 0.0f ? problem.sum(i) : before[at]);
      EXPECT_EQ(problem.scratch[at], beta == 0.0f ? -99.0f : problem.sum(i));
    }
  }
}

TEST(CudaGemmPlan, AsAPassOfTheirOwnSumsAreOverTheRowsOfA) {
  SumsProblem problem;
  const Floats before = problem.sums;
  cpu::column_sum(sums_of(problem.gemm(1.0f)), {});
  for (std::int64_t i = 0; i < SumsProblem::kOut; ++i)
    EXPECT_EQ(problem.sums[static_cast<std::size_t>(i)],
              before[static_cast<std::size_t>(i)] + problem.sum(i));
}

/// Addresses that are never read; `offset` bytes past a multiple of 16.
const void* address(std::size_t offset) {
  return reinterpret_cast<const void*>(std::uintptr_t{4096} + offset);
}
void* target(std::size_t offset) { return const_cast<void*>(address(offset)); }

Gemm fused_gemm() {
  return {.a = address(0),
          .b = address(0),
          .c = target(0),
          .bias = address(0),
          .pre = target(0),
          .m = 4,
          .n = 64,
          .k = 32,
          .lda = 32,
          .ldb = 64,
          .ldc = 64,
          .ab_dtype = DType::bf16,
          .c_dtype = DType::bf16,
          .epilogue = Epilogue::gelu_tanh};
}

TEST(CudaGemmPlan, FusesWhatTheLibraryOffers) {
  const Gemm all = fused_gemm();
  EXPECT_EQ(choose_fused(all), (Fused{true, true, true}));
  EXPECT_FALSE(needs_finish(all, choose_fused(all)));

  Gemm g = all;
  g.pre = nullptr;
  EXPECT_EQ(choose_fused(g), (Fused{true, true, false}));
  g.bias = nullptr;
  EXPECT_EQ(choose_fused(g), (Fused{false, true, false}));
  g.epilogue = Epilogue::none;
  EXPECT_FALSE(choose_fused(g).any());
  EXPECT_FALSE(needs_finish(g, {}));

  g = all;
  g.epilogue = Epilogue::gelu_erf;  // not offered: the bias is fused, gelu follows
  EXPECT_EQ(choose_fused(g), (Fused{true, false, false}));
  EXPECT_TRUE(needs_finish(g, choose_fused(g)));
}

Gemm gradient_gemm() {
  Gemm g = fused_gemm();
  g.bias = nullptr;
  g.epilogue = Epilogue::dgelu_tanh;
  return g;
}

TEST(CudaGemmPlan, FusesTheGradientOfGelu) {
  Gemm g = gradient_gemm();
  EXPECT_EQ(choose_fused(g), (Fused{.dgelu = true}));
  EXPECT_FALSE(needs_finish(g, choose_fused(g)));
  EXPECT_EQ(product_of(g, choose_fused(g)).pre, g.pre);
  for (const auto& change : std::vector<void (*)(Gemm&)>{
           [](Gemm& x) { x.epilogue = Epilogue::dgelu_erf; }, [](Gemm& x) { x.pre = target(8); },
           [](Gemm& x) { x.ldc = 68; }, [](Gemm& x) { x.ab_dtype = x.c_dtype = DType::f32; }}) {
    g = gradient_gemm();
    change(g);
    EXPECT_FALSE(choose_fused(g).any());
    EXPECT_TRUE(needs_finish(g, {}));
    EXPECT_EQ(product_of(g, {}).pre, nullptr);
  }
}

Gemm weight_gradient_gemm() {
  return {.a = address(0),
          .b = address(0),
          .c = target(0),
          .column_sums = static_cast<float*>(target(256)),
          .sums_scratch = static_cast<float*>(target(512)),
          .m = 64,
          .n = 32,
          .k = 40,
          .lda = 64,
          .ldb = 32,
          .ldc = 32,
          .trans_a = true,
          .ab_dtype = DType::bf16,
          .c_dtype = DType::f32,
          .beta = 1.0f,
          .sums_beta = 1.0f};
}

TEST(CudaGemmPlan, FusesColumnSumsOfSixteenBits) {
  Gemm g = weight_gradient_gemm();
  EXPECT_EQ(choose_fused(g), (Fused{.sums = true}));
  EXPECT_FALSE(needs_finish(g, choose_fused(g)));
  EXPECT_EQ(product_of(g, choose_fused(g)).sums, g.sums_scratch);
  EXPECT_EQ(product_of(g, {}).sums, nullptr);
  g.sums_beta = 0.0f;
  EXPECT_EQ(product_of(g, choose_fused(g)).sums, g.column_sums);

  g.column_sums = static_cast<float*>(target(260));  // too little aligned to be written by the product
  EXPECT_FALSE(choose_fused(g).any());
  g.sums_beta = 1.0f;  // which writes elsewhere then
  EXPECT_TRUE(choose_fused(g).sums);
  g.c_dtype = DType::bf16;  // the sums would be rounded
  EXPECT_FALSE(choose_fused(g).any());
  g.ab_dtype = g.c_dtype = DType::f32;
  EXPECT_FALSE(choose_fused(g).any());
}

TEST(CudaGemmPlan, Float32IsActivatedByThePassAfter) {
  Gemm g = fused_gemm();
  g.ab_dtype = g.c_dtype = DType::f32;
  EXPECT_EQ(choose_fused(g), (Fused{.bias = true}));
  EXPECT_TRUE(needs_finish(g, choose_fused(g)));
}

/// Where the product goes, and what the pass after it is told of `pre`.
struct Passes {
  const void* product;
  const void* pre;
  bool operator==(const Passes&) const = default;
};
Passes passes_of(const Gemm& g, const Fused& fused) {
  EXPECT_EQ(finish_of(g, fused).product, product_of(g, fused).result.data);
  EXPECT_EQ(finish_of(g, fused).c, g.c);
  return {product_of(g, fused).result.data, finish_of(g, fused).pre};
}

TEST(CudaGemmPlan, TheProductGoesToPreWhereAPassActivatesIt) {
  Gemm g = fused_gemm();
  g.c = target(1024);
  EXPECT_EQ(product_of(g, choose_fused(g)).result.data, g.c);
  // The bias is done: pre is complete, and the pass only reads it.
  EXPECT_EQ(passes_of(g, {.bias = true}), (Passes{g.pre, nullptr}));
  EXPECT_EQ(finish_of(g, {.bias = true}).bias, nullptr);
  EXPECT_EQ(passes_of(g, {}), (Passes{g.pre, g.pre}));
  EXPECT_EQ(finish_of(g, {}).bias, g.bias);
  Gemm adding = g;
  adding.beta = 1.0f;  // what it adds to is in C
  EXPECT_EQ(passes_of(adding, {.bias = true}), (Passes{g.c, g.pre}));
  Gemm unwanted = g;
  unwanted.pre = nullptr;
  EXPECT_EQ(passes_of(unwanted, {.bias = true}), (Passes{g.c, nullptr}));
  Gemm empty = g;
  empty.k = 0;
  empty.bias = nullptr;
  EXPECT_TRUE(finish_of(empty, {}).clear);
  EXPECT_EQ(finish_of(empty, {}).pre, g.pre);  // no product has written it

  Gemm gradient = gradient_gemm();
  gradient.c = target(1024);
  EXPECT_EQ(passes_of(gradient, {}), (Passes{gradient.c, gradient.pre}));
  EXPECT_EQ(finish_of(gradient, {}).epilogue, Epilogue::dgelu_tanh);
}

TEST(CudaGemmPlan, LeavesWhatCannotBeFusedToThePassAfter) {
  Gemm g = fused_gemm();
  g.c_dtype = DType::f32;  // the library wants the bias in C's dtype, and gelu comes after the bias
  EXPECT_FALSE(choose_fused(g).any());
  EXPECT_TRUE(needs_finish(g, {}));

  g = fused_gemm();
  g.bias = address(2);
  EXPECT_FALSE(choose_fused(g).any());

  g = fused_gemm();
  g.pre = target(8);
  EXPECT_EQ(choose_fused(g), (Fused{true, false, false}));
  EXPECT_TRUE(needs_finish(g, choose_fused(g)));

  g = fused_gemm();
  g.ldc = 68;
  EXPECT_EQ(choose_fused(g), (Fused{true, false, false}));
  g.pre = nullptr;  // only pre minds
  EXPECT_EQ(choose_fused(g), (Fused{true, true, false}));
}

TEST(CudaGemmPlan, KeysTellProblemsApart) {
  std::set<std::string> keys;
  const auto add = [&keys](const Gemm& g, const Fused& fused) {
    return keys.insert(key_of(product_of(g, fused)).text()).second;
  };
  const Gemm base = fused_gemm();
  const Fused all = choose_fused(base);
  EXPECT_TRUE(add(base, all));
  EXPECT_TRUE(add(base, {}));
  EXPECT_TRUE(add(base, {.bias = true}));
  EXPECT_TRUE(add(base, {.bias = true, .gelu = true}));
  EXPECT_TRUE(add(gradient_gemm(), {.dgelu = true}));
  EXPECT_TRUE(add(weight_gradient_gemm(), {}));
  EXPECT_TRUE(add(weight_gradient_gemm(), {.sums = true}));
  const auto changed = [&](auto change) {
    Gemm g = base;
    change(g);
    return add(g, all);
  };
  EXPECT_TRUE(changed([](Gemm& g) { g.m = 5; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.n = 56; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.k = 31; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.lda = 40; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.ldb = 72; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.ldc = 72; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.trans_a = true, g.lda = 33; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.beta = 1.0f; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.ab_dtype = DType::f16; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.c_dtype = DType::f32; }));
  EXPECT_TRUE(changed([](Gemm& g) { g.a = address(2); }));
  EXPECT_TRUE(changed([](Gemm& g) { g.b = address(4); }));
  EXPECT_TRUE(changed([](Gemm& g) { g.c = target(8); }));
  EXPECT_FALSE(changed([](Gemm& g) { g.a = address(512); }));  // as aligned as before
  Product scaled = product_of(base, all);
  static const float one = 1.0f;
  scaled.scales.second = &one;
  EXPECT_TRUE(keys.insert(key_of(scaled).text()).second);
}

TEST(CudaGemmPlan, RefusesDtypesTheLibraryHasNoProductFor) {
  for (const DType ab : {DType::f32, DType::bf16, DType::f16}) {
    EXPECT_NO_THROW(check_dtypes(ab, ab));
    EXPECT_NO_THROW(check_dtypes(ab, DType::f32));
  }
  EXPECT_THROW(check_dtypes(DType::f32, DType::bf16), InvalidArgument);
  EXPECT_THROW(check_dtypes(DType::bf16, DType::f16), InvalidArgument);
  EXPECT_THROW(check_dtypes(DType::i32, DType::i32), InvalidArgument);
}

}  // namespace
}  // namespace tessera::kernels::cuda
