/// The products of the CUDA backend beside the CPU's, over layouts, dtypes, epilogues, odd sizes and rows
/// that start anywhere; batches.

#include "kernels/cuda/gemm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/api/gemm.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"
#include "tests/kernels/cuda/random_values.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::kUnit;
using test::random;

struct Case {
  std::int64_t m = 0, n = 0, k = 0;
  bool trans_a = false, trans_b = false;
  std::int64_t pad = 0;    ///< of leading dimensions
  std::size_t offset = 0;  ///< elements by which operands are shifted from an aligned address
  bool bias = false;
  float beta = 0.0f;
  Epilogue epilogue = Epilogue::none;
  bool pre = false;
};

std::ostream& operator<<(std::ostream& out, const Case& t) {
  return out << t.m << "x" << t.n << "x" << t.k << (t.trans_a ? " T" : " N") << (t.trans_b ? "T" : "N")
             << " pad " << t.pad << " offset " << t.offset << " bias " << t.bias << " beta " << t.beta
             << " epilogue " << static_cast<int>(t.epilogue) << " pre " << t.pre;
}

/// Both round the same sum, and the device may do so before and after the bias. `terms` bounds the absolute
/// values that were added up; the activations' slope is at most 1.13.
template <typename T>
void expect_near(const std::vector<T>& got, const std::vector<T>& want, double terms, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto w = static_cast<double>(static_cast<float>(want[i]));
    const double allowed = 4e-7 * terms + 3.0 * kUnit<T> * (1.0 + std::fabs(w));
    ASSERT_NEAR(static_cast<double>(static_cast<float>(got[i])), w, allowed) << what << " " << i;
  }
}

/// The CPU's result and pre in one stretch each, with what lies between rows.
template <typename AB, typename C>
struct Operands {
  std::vector<AB> a, b, bias;
  std::vector<C> c, pre;
  Gemm params;

  explicit Operands(const Case& t)
      : a(random<AB>((t.trans_a ? t.k : t.m) * ((t.trans_a ? t.m : t.k) + t.pad), 1)),
        b(random<AB>((t.trans_b ? t.n : t.k) * ((t.trans_b ? t.k : t.n) + t.pad), 2)),
        bias(random<AB>(t.n, 3)),
        c(random<C>(t.m * (t.n + t.pad), 4)),
        pre(random<C>(t.m * (t.n + t.pad), 5)) {
    params.m = t.m, params.n = t.n, params.k = t.k;
    params.lda = (t.trans_a ? t.m : t.k) + t.pad;
    params.ldb = (t.trans_b ? t.k : t.n) + t.pad;
    params.ldc = t.n + t.pad;
    params.trans_a = t.trans_a, params.trans_b = t.trans_b;
    params.ab_dtype = dtype_of<AB>::value, params.c_dtype = dtype_of<C>::value;
    params.beta = t.beta;
    params.epilogue = t.epilogue;
  }
};

template <typename AB, typename C>
void check(const Case& t) {
  SCOPED_TRACE(::testing::Message() << t << " " << name_of(dtype_of<AB>::value) << " into "
                                    << name_of(dtype_of<C>::value));
  Operands<AB, C> o(t);
  const DeviceStream stream;
  const DeviceBuffer<AB> a(stream, o.a, t.offset), b(stream, o.b, t.offset), bias(stream, o.bias, t.offset);
  const DeviceBuffer<C> c(stream, o.c, t.offset), pre(stream, o.pre, t.offset);
  Gemm g = o.params;
  g.a = a.data(), g.b = b.data(), g.c = c.data();
  g.bias = t.bias ? bias.data() : nullptr;
  g.pre = t.pre ? pre.data() : nullptr;
  cuda::gemm(g, stream.launch());

  g = o.params;
  g.a = o.a.data(), g.b = o.b.data(), g.c = o.c.data();
  g.bias = t.bias ? o.bias.data() : nullptr;
  g.pre = t.pre ? o.pre.data() : nullptr;
  cpu::gemm(g, {.threads = 1});
  const auto terms = static_cast<double>(t.k + 2);
  expect_near(c.host(), o.c, terms, "c");
  expect_near(pre.host(), o.pre, terms, "pre");
}

template <typename AB, typename C>
void check_layouts() {
  constexpr std::int64_t kSizes[][3] = {{1, 1, 1},    {1, 40, 24},  {33, 1, 5},
                                        {31, 29, 37}, {64, 96, 32}, {130, 72, 264}};
  for (const auto& [m, n, k] : kSizes) {
    for (int way = 0; way < 8; ++way) {
      for (const std::int64_t pad : {0, 3, 8}) {
        check<AB, C>({.m = m,
                      .n = n,
                      .k = k,
                      .trans_a = (way & 1) != 0,
                      .trans_b = (way & 2) != 0,
                      .pad = pad,
                      .offset = pad == 3 ? std::size_t{1} : 0,
                      .beta = (way & 4) != 0 ? 1.0f : 0.0f});
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

template <typename AB, typename C>
void check_epilogues() {
  for (const Epilogue epilogue : {Epilogue::none, Epilogue::gelu_tanh, Epilogue::gelu_erf}) {
    for (int way = 0; way < 8; ++way) {
      for (const std::int64_t n : {48, 43}) {
        for (const std::size_t offset : {std::size_t{0}, std::size_t{1}}) {
          const bool pre = (way & 4) != 0 && epilogue != Epilogue::none;
          check<AB, C>({.m = 21,
                        .n = n,
                        .k = 40,
                        .trans_b = true,
                        .pad = n == 43 ? 2 : 0,
                        .offset = offset,
                        .bias = (way & 1) != 0,
                        .beta = (way & 2) != 0 ? 1.0f : 0.0f,
                        .epilogue = epilogue,
                        .pre = pre});
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

template <typename T>
void check_gradients() {
  for (const Epilogue epilogue : {Epilogue::dgelu_tanh, Epilogue::dgelu_erf}) {
    for (const std::int64_t n : {48, 43}) {
      for (const std::int64_t pad : {0, 5, 8}) {
        for (const std::size_t offset : {std::size_t{0}, std::size_t{1}}) {
          for (const std::int64_t k : {40, 0}) {
            check<T, T>(
                {.m = 21, .n = n, .k = k, .pad = pad, .offset = offset, .epilogue = epilogue, .pre = true});
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CudaGemm, Float32InEveryLayout) {
  SKIP_WITHOUT_CUDA();
  check_layouts<float, float>();
}
TEST(CudaGemm, Bfloat16InEveryLayout) {
  SKIP_WITHOUT_CUDA();
  check_layouts<bfloat16, bfloat16>();
}
TEST(CudaGemm, Float16InEveryLayout) {
  SKIP_WITHOUT_CUDA();
  check_layouts<float16, float16>();
}
TEST(CudaGemm, SixteenBitsIntoFloat32InEveryLayout) {
  SKIP_WITHOUT_CUDA();
  check_layouts<bfloat16, float>();
  check_layouts<float16, float>();
}

TEST(CudaGemm, BiasAndEpilogues) {
  SKIP_WITHOUT_CUDA();
  check_epilogues<float, float>();
  check_epilogues<bfloat16, bfloat16>();
  check_epilogues<float16, float16>();
  check_epilogues<bfloat16, float>();
}

TEST(CudaGemm, GradientsOfActivations) {
  SKIP_WITHOUT_CUDA();
  check_gradients<float>();
  check_gradients<bfloat16>();
  check_gradients<float16>();
}

/// A weight gradient with its bias gradient, twice: the second adds to the first.
template <typename AB>
void check_column_sums(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t pad, float sums_beta,
                       std::size_t sums_offset) {
  const Case t{.m = m, .n = n, .k = k, .trans_a = true, .pad = pad, .offset = pad == 3 ? std::size_t{1} : 0};
  SCOPED_TRACE(::testing::Message() << t << " " << name_of(dtype_of<AB>::value) << " sums beta " << sums_beta
                                    << " offset " << sums_offset);
  Operands<AB, float> o(t);
  auto sums = random<float>(m, 6);
  if (sums_beta == 0.0f) sums[0] = NAN;
  std::vector<float> scratch(static_cast<std::size_t>(kReduceParts * m), NAN);
  const DeviceStream stream;
  const DeviceBuffer<AB> a(stream, o.a, t.offset), b(stream, o.b, t.offset);
  const DeviceBuffer<float> c(stream, o.c), device_sums(stream, sums, sums_offset),
      device_scratch(stream, scratch);
  for (const float beta : {sums_beta, 1.0f}) {
    Gemm g = o.params;
    g.sums_beta = beta;
    g.a = a.data(), g.b = b.data(), g.c = c.data();
    g.column_sums = device_sums.data(), g.sums_scratch = device_scratch.data();
    cuda::gemm(g, stream.launch());
    g.a = o.a.data(), g.b = o.b.data(), g.c = o.c.data();
    g.column_sums = sums.data(), g.sums_scratch = scratch.data();
    cpu::gemm(g, {.threads = 1});
  }
  expect_near(c.host(), o.c, static_cast<double>(k + 2), "c");
  expect_near(device_sums.host(), sums, static_cast<double>(2 * k + 1), "sums");
}

TEST(CudaGemm, ColumnSumsBesideTheProduct) {
  SKIP_WITHOUT_CUDA();
  constexpr std::int64_t kSizes[][3] = {{1, 1, 1}, {40, 1, 24}, {31, 29, 37}, {96, 64, 264}, {24, 40, 0}};
  for (const auto& [m, n, k] : kSizes) {
    for (const std::int64_t pad : {0, 3, 8}) {
      for (const float beta : {0.0f, 1.0f}) {
        for (const std::size_t offset : {std::size_t{0}, std::size_t{1}}) {
          check_column_sums<float>(m, n, k, pad, beta, offset);
          check_column_sums<bfloat16>(m, n, k, pad, beta, offset);
          check_column_sums<float16>(m, n, k, pad, beta, offset);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// 2^-12 beside 1 would vanish in 16 bits.
TEST(CudaGemm, ColumnSumsAreFloat32) {
  SKIP_WITHOUT_CUDA();
  constexpr std::int64_t n = 64;
  const DeviceStream stream;
  std::vector<bfloat16> values(n * n, bfloat16(1.0f / 4096));
  std::fill_n(values.begin(), n, bfloat16(1.0f));
  const DeviceBuffer<bfloat16> a(stream, values), b(stream, values);
  const DeviceBuffer<float> c(stream, std::vector<float>(n * n)), sums(stream, std::vector<float>(n, 2.0f)),
      scratch(stream, std::vector<float>(kReduceParts * n));
  cuda::gemm({.a = a.data(),
              .b = b.data(),
              .c = c.data(),
              .column_sums = sums.data(),
              .sums_scratch = scratch.data(),
              .m = n,
              .n = n,
              .k = n,
              .lda = n,
              .ldb = n,
              .ldc = n,
              .trans_a = true,
              .ab_dtype = DType::bf16,
              .sums_beta = 1.0f},
             stream.launch());
  for (const float x : sums.host()) ASSERT_EQ(x, 3.0f + 63.0f / 4096);
}

// What is left of a product when there is nothing to multiply.
TEST(CudaGemm, EmptyProducts) {
  SKIP_WITHOUT_CUDA();
  for (const float beta : {0.0f, 1.0f}) {
    for (const bool bias : {false, true}) {
      check<bfloat16, float>({.m = 5, .n = 7, .k = 0, .pad = 1, .bias = bias, .beta = beta});
      check<float, float>({.m = 0, .n = 7, .k = 3, .bias = bias, .beta = beta});
      check<float, float>({.m = 5, .n = 0, .k = 3, .bias = bias, .beta = beta});
    }
  }
  check<bfloat16, bfloat16>({.m = 5, .n = 8, .bias = true, .epilogue = Epilogue::gelu_tanh, .pre = true});
}

// fp32 is not TF32: 2^-12 beside 1 survives a product of 1.
TEST(CudaGemm, KeepsFloat32) {
  SKIP_WITHOUT_CUDA();
  constexpr std::int64_t n = 64;
  const DeviceStream stream;
  const float value = 1.0f + 1.0f / 4096;
  const DeviceBuffer<float> a(stream, std::vector<float>(n * n, value)),
      b(stream, std::vector<float>(n * n, 1.0f)), c(stream, std::vector<float>(n * n));
  cuda::gemm(
      {.a = a.data(), .b = b.data(), .c = c.data(), .m = n, .n = n, .k = n, .lda = n, .ldb = n, .ldc = n},
      stream.launch());
  for (const float x : c.host()) ASSERT_EQ(x, n * value);
}

TEST(CudaGemm, RepeatsBitForBit) {
  SKIP_WITHOUT_CUDA();
  const Case t{.m = 33, .n = 24, .k = 5000, .trans_b = true, .bias = true};  // few elements, long sums
  Operands<bfloat16, bfloat16> o(t);
  const DeviceStream stream;
  const DeviceBuffer<bfloat16> a(stream, o.a), b(stream, o.b), bias(stream, o.bias), c(stream, o.c);
  Gemm g = o.params;
  g.a = a.data(), g.b = b.data(), g.c = c.data(), g.bias = bias.data();
  cuda::gemm(g, stream.launch());
  const auto first = c.host();
  for (int run = 0; run < 5; ++run) {
    cuda::gemm(g, stream.launch());
    const auto again = c.host();
    for (std::size_t i = 0; i < first.size(); ++i) ASSERT_EQ(again[i].bits, first[i].bits);
  }
}

TEST(CudaGemm, ColumnSumsRepeatBitForBit) {
  SKIP_WITHOUT_CUDA();
  const Case t{.m = 48, .n = 24, .k = 5000, .trans_a = true};  // few elements, long sums
  Operands<bfloat16, float> o(t);
  const DeviceStream stream;
  const DeviceBuffer<bfloat16> a(stream, o.a), b(stream, o.b);
  const DeviceBuffer<float> c(stream, o.c), sums(stream, std::vector<float>(48)),
      scratch(stream, std::vector<float>(kReduceParts * 48));
  Gemm g = o.params;
  g.a = a.data(), g.b = b.data(), g.c = c.data();
  g.column_sums = sums.data(), g.sums_scratch = scratch.data();
  cuda::gemm(g, stream.launch());
  const auto product = c.host(), first = sums.host();
  for (int run = 0; run < 5; ++run) {
    cuda::gemm(g, stream.launch());
    ASSERT_EQ(c.host(), product);
    ASSERT_EQ(sums.host(), first);
  }
}

/// C_i = alpha A_i B_i + beta C_i, one by one on the CPU.
template <typename AB, typename C>
void check_batch(int way, float alpha, float beta, std::int64_t stride_b) {
  constexpr std::int64_t m = 19, n = 23, k = 24, batch = 3;
  cuda::BatchedGemm g{.m = m, .n = n, .k = k, .ldc = n};
  g.trans_a = (way & 1) != 0, g.trans_b = (way & 2) != 0;
  g.lda = g.trans_a ? m : k, g.ldb = g.trans_b ? k : n;
  g.ab_dtype = dtype_of<AB>::value, g.c_dtype = dtype_of<C>::value;
  g.alpha = alpha, g.beta = beta, g.batch = batch;
  g.stride_a = m * k + 5, g.stride_b = stride_b, g.stride_c = m * n;
  const auto a = random<AB>(batch * g.stride_a, 1), b = random<AB>(batch * n * k, 2);
  const auto before = random<C>(batch * m * n, 3);
  const DeviceStream stream;
  const DeviceBuffer<AB> device_a(stream, a), device_b(stream, b);
  const DeviceBuffer<C> device_c(stream, before);
  g.a = device_a.data(), g.b = device_b.data(), g.c = device_c.data();
  cuda::batched_gemm(g, stream.launch());
  std::vector<C> want = before;
  for (std::int64_t i = 0; i < batch; ++i) {
    std::vector<float> product(m * n);
    cpu::gemm({.a = a.data() + i * g.stride_a,
               .b = b.data() + i * stride_b,
               .c = product.data(),
               .m = m,
               .n = n,
               .k = k,
               .lda = g.lda,
               .ldb = g.ldb,
               .ldc = n,
               .trans_a = g.trans_a,
               .trans_b = g.trans_b,
               .ab_dtype = g.ab_dtype},
              {.threads = 1});
    for (std::int64_t j = 0; j < m * n; ++j) {
      C& target = want[static_cast<std::size_t>(i * m * n + j)];
      target = C(alpha * product[static_cast<std::size_t>(j)] + beta * static_cast<float>(target));
    }
  }
  expect_near(device_c.host(), want, k + 2, "batch");
}

TEST(CudaGemm, Batches) {
  SKIP_WITHOUT_CUDA();
  for (int way = 0; way < 4; ++way) {
    for (const std::int64_t stride_b : {0, 23 * 24}) {
      check_batch<float, float>(way, 1.0f, 0.0f, stride_b);
      check_batch<bfloat16, float>(way, 0.5f, 1.0f, stride_b);
      check_batch<bfloat16, bfloat16>(way, 0.5f, 0.0f, stride_b);
      check_batch<float16, float>(way, 2.0f, -1.0f, stride_b);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
