/// The matrix product against sums in double, over transpositions, dtypes, leading dimensions and epilogues.

#include "kernels/api/gemm.hpp"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "kernels/api/reduce.hpp"
#include "kernels/cpu/gemm_common.hpp"
#include "kernels/cpu/vector/gemm_few_rows.hpp"
#include "tests/kernels/buffer.hpp"
#include "tests/kernels/gelu.hpp"

namespace tessera::kernels {
namespace {

using testing::Buffer;
using testing::expect_same;

using Implementation = void (*)(const Gemm&, const Launch&);

struct Case {
  std::int64_t m, n, k;
  bool trans_a = false, trans_b = false;
  DType ab = DType::f32, c = DType::f32;
  std::int64_t pad_a = 0, pad_b = 0, pad_c = 0;  ///< leading dimension beyond the least
  bool bias = false;
  float beta = 0.0f;
  Epilogue epilogue = Epilogue::none;
  bool keep_pre = false;
  int threads = 1;
};

std::ostream& operator<<(std::ostream& out, const Case& t) {
  return out << t.m << "x" << t.n << "x" << t.k << (t.trans_a ? " T" : " N") << (t.trans_b ? "T " : "N ")
             << t.ab << " to " << t.c << " pads " << t.pad_a << " " << t.pad_b << " " << t.pad_c << " bias "
             << t.bias << " beta " << t.beta << " epilogue " << static_cast<int>(t.epilogue)
             << (t.keep_pre ? " with pre" : "") << " threads " << t.threads;
}

/// What the epilogue makes of the sum x.
double applied(double x, double pre, Epilogue kind) {
  switch (kind) {
    case Epilogue::none:
      return x;
    case Epilogue::gelu_tanh:
      return testing::gelu_tanh(x);
    case Epilogue::gelu_erf:
      return testing::gelu_erf(x);
    case Epilogue::dgelu_tanh:
      return x * testing::gelu_tanh_slope(pre);
    case Epilogue::dgelu_erf:
      return x * testing::gelu_erf_slope(pre);
  }
  return std::nan("");
}

constexpr double kUntouched = 77.0;  // what padding holds before and must hold after

struct Operands {
  Gemm params;
  Buffer a, b, bias, c, pre;

  explicit Operands(const Case& t)
      : a(Buffer::random(t.ab, (t.trans_a ? t.k : t.m) * ((t.trans_a ? t.m : t.k) + t.pad_a), 1)),
        b(Buffer::random(t.ab, (t.trans_b ? t.n : t.k) * ((t.trans_b ? t.k : t.n) + t.pad_b), 2)),
        bias(Buffer::random(t.ab, t.n, 3)),
        c(t.c, t.m * (t.n + t.pad_c), kUntouched),
        pre(is_gradient(t.epilogue) ? Buffer::random(t.c, t.m * (t.n + t.pad_c), 5, 3.0)
                                    : Buffer(t.c, t.m * (t.n + t.pad_c), kUntouched)) {
    const Buffer start = Buffer::random(t.c, t.m * t.n, 4);
    for (std::int64_t i = 0; i < t.m * t.n; ++i) {
      // With beta 0 C must not be read: NaN in it would show.
      c.set(i / t.n * (t.n + t.pad_c) + i % t.n, t.beta == 0.0f ? std::nan("") : start[i]);
    }
    params = {.a = a.data(),
              .b = b.data(),
              .c = c.data(),
              .bias = t.bias ? bias.data() : nullptr,
              .pre = t.keep_pre ? pre.data() : nullptr,
              .m = t.m,
              .n = t.n,
              .k = t.k,
              .lda = (t.trans_a ? t.m : t.k) + t.pad_a,
              .ldb = (t.trans_b ? t.k : t.n) + t.pad_b,
              .ldc = t.n + t.pad_c,
              .trans_a = t.trans_a,
              .trans_b = t.trans_b,
              .ab_dtype = t.ab,
              .c_dtype = t.c,
              .beta = t.beta,
              .epilogue = t.epilogue};
  }
};

/// The value before the activation, and the sum of the absolute values of all terms, to which rounding is
/// relative.
std::pair<double, double> reference(const Operands& o, const Buffer& c_before, std::int64_t i,
                                    std::int64_t j) {
  const Gemm& g = o.params;
  double sum = g.beta == 0.0f ? 0.0 : g.beta * c_before[i * g.ldc + j], size = std::fabs(sum);
  for (std::int64_t k = 0; k < g.k; ++k) {
    const double term =
        o.a[g.trans_a ? k * g.lda + i : i * g.lda + k] * o.b[g.trans_b ? j * g.ldb + k : k * g.ldb + j];
    sum += term;
    size += std::fabs(term);
  }
  if (g.bias != nullptr) {
    sum += o.bias[j];
    size += std::fabs(o.bias[j]);
  }
  return {sum, size};
}

void check(const Case& t, Implementation multiply = cpu::gemm) {
  SCOPED_TRACE(::testing::Message() << t);
  Operands o(t);
  const Buffer before = o.c, pre_before = o.pre;
  multiply(o.params, {.threads = t.threads});
  // Rounding of C (and of pre, through which C then goes) to 16 bits; of sums in fp32 otherwise.
  const double unit = testing::rounding_of(t.c);
  for (std::int64_t i = 0; i < t.m; ++i) {
    for (std::int64_t j = 0; j < t.n + t.pad_c; ++j) {
      const std::int64_t at = i * o.params.ldc + j;
      if (j >= t.n) {
        ASSERT_EQ(o.c[at], kUntouched) << "padding of row " << i;
        ASSERT_EQ(o.pre[at], pre_before[at]) << "padding of row " << i;
        continue;
      }
      const auto [x, size] = reference(o, before, i, j);
      const double rounding = 1e-6 * size + 1e-6;
      if (is_gradient(t.epilogue)) {
        ASSERT_EQ(o.pre[at], pre_before[at]) << i << ", " << j;
      } else if (t.keep_pre) {
        ASSERT_NEAR(o.pre[at], x, rounding + unit * std::fabs(x)) << i << ", " << j;
      }
      const double y = applied(x, pre_before[at], t.epilogue);
      // |gelu'| <= 1.13.
      const double through = t.epilogue == Epilogue::none ? 0.0 : 1.2 * unit * std::fabs(x);
      ASSERT_NEAR(o.c[at], y, 1.2 * rounding + through + unit * std::fabs(y)) << i << ", " << j;
    }
  }
}

constexpr std::array<std::array<std::int64_t, 3>, 7> kSizes{
    {{1, 1, 1}, {1, 37, 19}, {17, 1, 5}, {3, 5, 1}, {31, 29, 37}, {64, 96, 32}, {101, 67, 131}}};

void check_layouts(DType ab, DType c, Implementation multiply) {
  for (const auto& [m, n, k] : kSizes) {
    for (int layout = 0; layout < 4; ++layout) {
      for (const float beta : {0.0f, 1.0f}) {
        for (const std::int64_t pad : {0, 3}) {
          for (const int threads : {1, 2}) {
            check({.m = m,
                   .n = n,
                   .k = k,
                   .trans_a = (layout & 1) != 0,
                   .trans_b = (layout & 2) != 0,
                   .ab = ab,
                   .c = c,
                   .pad_a = pad,
                   .pad_b = 2 * pad,
                   .pad_c = pad,
                   .beta = beta,
                   .threads = threads},
                  multiply);
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Gemm, Float32InEveryLayout) { check_layouts(DType::f32, DType::f32, cpu::gemm); }
TEST(Gemm, Bfloat16InEveryLayout) { check_layouts(DType::bf16, DType::bf16, cpu::gemm); }
TEST(Gemm, Bfloat16IntoFloat32InEveryLayout) { check_layouts(DType::bf16, DType::f32, cpu::gemm); }
TEST(Gemm, Float32IntoBfloat16InEveryLayout) { check_layouts(DType::f32, DType::bf16, cpu::gemm); }
TEST(Gemm, Float16InEveryLayout) { check_layouts(DType::f16, DType::f16, cpu::gemm); }
TEST(Gemm, Float16IntoFloat32InEveryLayout) { check_layouts(DType::f16, DType::f32, cpu::gemm); }
TEST(Gemm, Float32IntoFloat16InEveryLayout) { check_layouts(DType::f32, DType::f16, cpu::gemm); }
TEST(Gemm, WithoutBfloat16InstructionsInEveryLayout) {
  check_layouts(DType::bf16, DType::bf16, cpu::gemm_through_f32);
  check_layouts(DType::bf16, DType::f32, cpu::gemm_through_f32);
}

TEST(Gemm, BiasAndEpilogues) {
  for (const Epilogue epilogue : {Epilogue::none, Epilogue::gelu_tanh, Epilogue::gelu_erf}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const bool keep_pre : {false, true}) {
        for (const std::int64_t pad : {0, 5}) {
          for (const std::int64_t m : {1, 13, 50}) {
            for (const bool trans_b : {false, true}) {
              for (const float beta : {0.0f, 1.0f}) {
                check({.m = m,
                       .n = 43,
                       .k = 23,
                       .trans_b = trans_b,
                       .ab = dtype,
                       .c = dtype,
                       .pad_c = pad,
                       .bias = true,
                       .beta = beta,
                       .epilogue = epilogue,
                       .keep_pre = keep_pre && epilogue != Epilogue::none,
                       .threads = 2});
                if (HasFatalFailure()) return;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Gemm, GradientsOfActivations) {
  for (const Epilogue epilogue : {Epilogue::dgelu_tanh, Epilogue::dgelu_erf}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const std::int64_t pad : {0, 5}) {
        for (const auto& [m, n, k] : kSizes) {
          for (const int threads : {1, 2}) {
            check({.m = m,
                   .n = n,
                   .k = k,
                   .ab = dtype,
                   .c = dtype,
                   .pad_c = pad,
                   .epilogue = epilogue,
                   .keep_pre = true,
                   .threads = threads});
            if (HasFatalFailure()) return;
          }
        }
      }
      // More than one part for each thread; nothing to multiply.
      check({.m = 70,
             .n = 130,
             .k = 3,
             .ab = dtype,
             .c = dtype,
             .epilogue = epilogue,
             .keep_pre = true,
             .threads = 2});
      check({.m = 5, .n = 7, .k = 0, .ab = dtype, .c = dtype, .epilogue = epilogue, .keep_pre = true});
    }
  }
}

// Sizes that are cut into several blocks, with a small block left over, in the implementations that cut.
TEST(Gemm, BlockedSizes) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    check({.m = 9, .n = 1301, .k = 12, .trans_a = true, .ab = dtype, .beta = 1.0f, .threads = 2});
    check({.m = 2051, .n = 9, .k = 5, .trans_a = true, .ab = dtype, .bias = true, .threads = 2});
    check({.m = 5, .n = 521, .k = 4099, .ab = dtype, .c = dtype, .bias = true, .threads = 2});
    check(
        {.m = 3, .n = 1543, .k = 261, .trans_b = true, .ab = dtype, .c = dtype, .bias = true, .threads = 2});
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    check({.m = 1030, .n = 5, .k = 3, .ab = dtype, .beta = 1.0f, .threads = 2}, cpu::gemm_through_f32);
    check(
        {.m = 3, .n = 1030, .k = 1027, .trans_b = true, .ab = dtype, .c = dtype, .bias = true, .threads = 2},
        cpu::gemm_through_f32);
  }
}

// As text is generated: each number of rows that has code of its own, and one that has none.
TEST(Gemm, FewRows) {
  for (std::int64_t m = 1; m <= 17; ++m) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      check({.m = m, .n = 43, .k = 53, .trans_b = true, .ab = dtype, .c = dtype, .pad_b = 1, .bias = true});
      check({.m = m,
             .n = 263,
             .k = 129,
             .trans_b = true,
             .ab = dtype,
             .beta = 1.0f,
             .epilogue = Epilogue::gelu_tanh,
             .keep_pre = true,
             .threads = 2});
    }
  }
}

TEST(Gemm, FewRowsInEveryInstructionSet) {
  constexpr std::int64_t n = 19, k = 85;
  for (const auto& [isa, range] : TESSERA_COPIES(gemm_few_rows_range)) {
    for (const std::int64_t m : {1, 3, 4, 7, 13}) {
      const Buffer a = Buffer::random(DType::f32, m * k, 1), b = Buffer::random(DType::bf16, n * k, 2);
      Buffer c(DType::f32, m * n, kUntouched);
      range({.m = m,
             .k = k,
             .lda = k,
             .ldb = k,
             .ldc = n,
             .a = static_cast<const float*>(a.data()),
             .b_dtype = DType::bf16,
             .b = b.data(),
             .c = c.data()},
            1, n - 1);
      for (std::int64_t at = 0; at < m * n; ++at) {
        double sum = 0;
        for (std::int64_t i = 0; i < k; ++i) sum += a[at / n * k + i] * b[at % n * k + i];
        const bool asked = at % n > 0 && at % n < n - 1;
        EXPECT_NEAR(c[at], asked ? sum : kUntouched, 1e-4) << cpu::isa_name(isa) << ", " << m << " rows";
      }
    }
  }
}

/// Bit for bit the product without the sums and the sums as a pass of their own.
void check_column_sums(const Case& t, float sums_beta) {
  SCOPED_TRACE(::testing::Message() << t << " sums beta " << sums_beta);
  Operands with(t), without(t);
  Buffer start = Buffer::random(DType::f32, t.m, 6), scratch(DType::f32, kReduceParts * t.m, std::nan(""));
  if (sums_beta == 0.0f) start.set(0, std::nan(""));
  Buffer sums = start, expected = start;
  with.params.column_sums = sums.floats();
  with.params.sums_scratch = scratch.floats();
  with.params.sums_beta = sums_beta;
  cpu::gemm(with.params, {.threads = t.threads});
  cpu::gemm(without.params, {.threads = t.threads});
  expect_same(with.c, without.c);
  cpu::column_sum({.rows = t.k,
                   .cols = t.m,
                   .ld = t.m + t.pad_a,
                   .dtype = t.ab,
                   .x = without.a.data(),
                   .out = expected.floats(),
                   .beta = sums_beta,
                   .scratch = scratch.floats()},
                  {.threads = t.threads});
  expect_same(sums, expected);
  for (std::int64_t i = 0; i < t.m; ++i) {
    double sum = sums_beta == 0.0f ? 0.0 : start[i];
    for (std::int64_t k = 0; k < t.k; ++k) sum += with.a[k * (t.m + t.pad_a) + i];
    ASSERT_NEAR(sums[i], sum, 1e-6 * static_cast<double>(t.k + 1)) << i;
  }
}

TEST(Gemm, ColumnSumsBesideTheProduct) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const auto& [m, n, k] : kSizes) {
      for (const std::int64_t pad : {0, 3}) {
        for (const float sums_beta : {0.0f, 1.0f}) {
          check_column_sums({.m = m,
                             .n = n,
                             .k = k,
                             .trans_a = true,
                             .ab = dtype,
                             .pad_a = pad,
                             .beta = 1.0f - sums_beta,
                             .threads = pad == 0 ? 1 : 2},
                            sums_beta);
        }
      }
    }
    check_column_sums({.m = 5, .n = 3, .k = 0, .trans_a = true, .ab = dtype}, 0.0f);
    check_column_sums({.m = 5, .n = 3, .k = 0, .trans_a = true, .ab = dtype, .beta = 1.0f}, 1.0f);
    if (HasFatalFailure()) return;
  }
}

TEST(Gemm, EmptyProducts) {
  Buffer c(DType::f32, 6, 2.0), bias = Buffer::random(DType::f32, 3, 1);
  const Gemm none{
      .c = c.data(), .bias = bias.data(), .m = 2, .n = 3, .k = 0, .lda = 1, .ldb = 3, .ldc = 3, .beta = 1.0f};
  cpu::gemm(none, {});
  for (int i = 0; i < 6; ++i)
    EXPECT_FLOAT_EQ(static_cast<float>(c[i]), 2.0f + static_cast<float>(bias[i % 3]));
  Gemm cleared = none;
  cleared.bias = nullptr;
  cleared.beta = 0.0f;
  cpu::gemm(cleared, {});
  for (int i = 0; i < 6; ++i) EXPECT_EQ(c[i], 0.0);
  cpu::gemm({.m = 0, .n = 3, .k = 2, .lda = 2, .ldb = 3, .ldc = 3}, {});
  cpu::gemm({.m = 3, .n = 0, .k = 2, .lda = 2, .ldb = 1, .ldc = 1}, {});
}

// A sum of fp32 must not go through 16 bits on the way: 2^-12 would vanish beside 3.
void check_sums_are_fp32(DType dtype) {
  for (const bool trans_a : {false, true}) {
    Buffer a(dtype, 48 * 48, 1.0), b(dtype, 48 * 48, 1.0 / 16), c(DType::f32, 48 * 48, 1.0 / 4096);
    cpu::gemm({.a = a.data(),
               .b = b.data(),
               .c = c.data(),
               .m = 48,
               .n = 48,
               .k = 48,
               .lda = 48,
               .ldb = 48,
               .ldc = 48,
               .trans_a = trans_a,
               .ab_dtype = dtype,
               .beta = 1.0f},
              {.threads = 2});
    for (std::int64_t i = 0; i < c.size(); ++i) ASSERT_EQ(c[i], 3.0 + 1.0 / 4096);
  }
}
TEST(Gemm, AccumulatesBfloat16ProductsInFloat32) { check_sums_are_fp32(DType::bf16); }
TEST(Gemm, AccumulatesFloat16ProductsInFloat32) { check_sums_are_fp32(DType::f16); }

// Beyond 65504 a float16 result is infinite; a sum that only passes there on its way is not.
TEST(Gemm, Float16OverflowsInTheResultAlone) {
  Buffer a(DType::f16, 3), b(DType::f16, 3), c(DType::f16, 1);
  const double left[] = {60000, 60000, 60000}, cancelling[] = {1, 1, -1.5};
  for (int i = 0; i < 3; ++i) a.set(i, left[i]), b.set(i, cancelling[i]);
  Gemm params{.a = a.data(),
              .b = b.data(),
              .c = c.data(),
              .m = 1,
              .n = 1,
              .k = 3,
              .lda = 3,
              .ldb = 1,
              .ldc = 1,
              .ab_dtype = DType::f16,
              .c_dtype = DType::f16};
  cpu::gemm(params, {});
  EXPECT_EQ(c[0], 30000.0);
  b.set(2, 1.0);
  cpu::gemm(params, {});
  EXPECT_TRUE(std::isinf(c[0]));
}

TEST(Gemm, RepeatsBitForBit) {
  // The second size has few elements and long sums, which an implementation might share out over k.
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{130, 200, 300}, {33, 20, 5000}}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (int layout = 0; layout < 3; ++layout) {
        const Case t{.m = m,
                     .n = n,
                     .k = k,
                     .trans_a = layout == 2,
                     .trans_b = layout == 1,
                     .ab = dtype,
                     .c = dtype,
                     .bias = layout == 1};
        Operands first(t), second(t);
        cpu::gemm(first.params, {.threads = 2});
        cpu::gemm(second.params, {.threads = 2});
        expect_same(first.c, second.c);
      }
    }
  }
}

// Ranks that are threads of one process multiply at the same time, through one cache and one pool of buffers.
TEST(Gemm, CalledFromSeveralThreads) {
  constexpr int kRanks = 4;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([rank] {
      for (int i = 0; i < 6; ++i) {
        check({.m = 20 + i,
               .n = 30 + rank / 2,
               .k = 40,
               .trans_b = true,
               .ab = i % 2 ? DType::bf16 : DType::f32,
               .bias = true,
               .threads = 1 + rank % 2});
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

}  // namespace
}  // namespace tessera::kernels
