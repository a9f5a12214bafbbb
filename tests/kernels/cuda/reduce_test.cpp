/// Sums on CUDA against the CPU's.

#include "kernels/api/reduce.hpp"

#include "tests/kernels/cuda/compare.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_close;
using test::expect_same_bits;
using test::random_values;

TEST(CudaReduce, ColumnSumEqualsTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  test::for_each_float([&](auto t) {
    using T = decltype(t);
    for (const std::int64_t rows : {0, 1, 7, 16, 509, 1100}) {
      for (const std::int64_t cols : {1, 8, 31, 264}) {
        for (const std::int64_t gap : {0, 3, 8}) {
          const std::int64_t ld = cols + gap;
          const float beta = gap == 3 ? 0.0f : 1.0f;
          SCOPED_TRACE(::testing::Message() << rows << " x " << cols << ", ld " << ld << ", beta " << beta);
          const std::vector<T> x = random_values<T>(rows * ld, 1);
          std::vector<float> out = random_values<float>(cols, 2);
          if (beta == 0.0f) out[0] = NAN;
          std::vector<float> scratch(static_cast<std::size_t>(kReduceParts * cols), NAN);
          const DeviceBuffer<T> device_x(stream, x);
          const DeviceBuffer<float> device_out(stream, out), device_scratch(stream, scratch);
          ColumnSum params{.rows = rows,
                           .cols = cols,
                           .ld = ld,
                           .dtype = dtype_of<T>::value,
                           .x = x.data(),
                           .out = out.data(),
                           .beta = beta,
                           .scratch = scratch.data()};
          cpu::column_sum(params, {});
          params.x = device_x.data();
          params.out = device_out.data();
          params.scratch = device_scratch.data();
          cuda::column_sum(params, stream.launch());
          expect_close(device_out.host(), out, 1e-5);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(CudaReduce, ColumnSumOfMisalignedRows) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  const std::int64_t rows = 70, cols = 40;
  const std::vector<bfloat16> x = random_values<bfloat16>(rows * cols, 1);
  std::vector<float> results[2];
  for (const std::size_t offset : {0, 1}) {
    const DeviceBuffer<bfloat16> device_x(stream, x, offset);
    const DeviceBuffer<float> out(stream, std::vector<float>(cols));
    const DeviceBuffer<float> scratch(stream, std::vector<float>(kReduceParts * cols));
    cuda::column_sum({.rows = rows,
                      .cols = cols,
                      .ld = cols,
                      .dtype = DType::bf16,
                      .x = device_x.data(),
                      .out = out.data(),
                      .scratch = scratch.data()},
                     stream.launch());
    results[offset] = out.host();
  }
  expect_same_bits(results[0], results[1]);
}

struct Sums {
  double squares, sum, added;
};

/// The whole of n floats, in runs such as make_sum_runs gives.
std::vector<SumRun> whole_runs(std::int64_t n) {
  std::vector<SumRun> runs;
  for (std::int64_t i = 0; i < n; i += SumRun::kMost) runs.push_back({i, std::min(SumRun::kMost, n - i)});
  return runs;
}

/// All three, beginning at 10 where they add to what is there.
Sums sums_of(const DeviceStream& stream, const std::vector<float>& x, std::size_t offset) {
  const auto n = static_cast<std::int64_t>(x.size());
  const DeviceBuffer<float> device_x(stream, x, offset);
  const DeviceBuffer<double> out(stream, {10.0, NAN, 10.0}),
      scratch(stream, std::vector<double>(kSumParts, NAN));
  double* at = out.data();
  const std::vector<SumRun> runs = whole_runs(n);
  const DeviceBuffer<SumRun> device_runs(stream, runs);
  cuda::sum_squares({.num_runs = static_cast<std::int64_t>(runs.size()),
                     .runs = device_runs.data(),
                     .x = device_x.data(),
                     .out = at,
                     .scratch = scratch.data()},
                    stream.launch());
  cuda::sum({.n = n, .x = device_x.data(), .out = at + 1, .scratch = scratch.data()}, stream.launch());
  cuda::sum({.n = n, .add = true, .x = device_x.data(), .out = at + 2, .scratch = scratch.data()},
            stream.launch());
  const std::vector<double> results = out.host();
  return {results[0], results[1], results[2]};
}

TEST(CudaReduce, SumsEqualTheCpu) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  for (const std::int64_t n : {0, 1, 3, 1023, 8192, 16385, 300007}) {
    SCOPED_TRACE(n);
    const std::vector<float> x = random_values<float>(n, 3, 1.0f, 0.3f);
    std::vector<double> scratch(kSumParts);
    double squares = 10.0, sum = 0.0;
    const std::vector<SumRun> runs = whole_runs(n);
    cpu::sum_squares({.num_runs = static_cast<std::int64_t>(runs.size()),
                      .runs = runs.data(),
                      .x = x.data(),
                      .out = &squares,
                      .scratch = scratch.data()},
                     {});
    cpu::sum({.n = n, .x = x.data(), .out = &sum, .scratch = scratch.data()}, {});
    const Sums got = sums_of(stream, x, 0), misaligned = sums_of(stream, x, 1);
    EXPECT_NEAR(got.squares, squares, 1e-12 * squares);
    EXPECT_NEAR(got.sum, sum, 1e-12 * std::fabs(sum));
    EXPECT_NEAR(got.added, 10.0 + sum, 1e-12 * (10.0 + std::fabs(sum)));
    EXPECT_EQ(got.squares, misaligned.squares);
    EXPECT_EQ(got.sum, misaligned.sum);
  }
}

TEST(CudaReduce, MoreFloatsThanPartsHoldAtLeast) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  // Ones: every partition gives the same sum, exactly.
  const std::int64_t n = std::int64_t{kSumParts} * 8192 + 8192 + 1;
  const Sums got = sums_of(stream, std::vector<float>(static_cast<std::size_t>(n), 1.0f), 0);
  EXPECT_EQ(got.sum, static_cast<double>(n));
  EXPECT_EQ(got.squares, static_cast<double>(n) + 10.0);
}

TEST(CudaReduce, SquaresOfRunsThatBeginAnywhere) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  const std::vector<float> x = random_values<float>(200000, 8);
  std::vector<SumRun> runs;  // of all lengths and alignments, some empty
  double want = 0.0;
  for (std::int64_t i = 0, begin = 0; i < 180; begin += 6 * i + 3, ++i) {
    runs.push_back({begin, 6 * i});
    for (std::int64_t j = begin; j < begin + 6 * i; ++j) {
      const auto value = static_cast<double>(x[static_cast<std::size_t>(j)]);
      want += value * value;
    }
  }
  const DeviceBuffer<float> device_x(stream, x);
  const DeviceBuffer<SumRun> device_runs(stream, runs);
  const DeviceBuffer<double> out(stream, {0.0}), scratch(stream, std::vector<double>(kSumParts, NAN));
  cuda::sum_squares({.num_runs = static_cast<std::int64_t>(runs.size()),
                     .runs = device_runs.data(),
                     .x = device_x.data(),
                     .out = out.data(),
                     .scratch = scratch.data()},
                    stream.launch());
  EXPECT_NEAR(out.host()[0], want, 1e-12 * want);
}

TEST(CudaReduce, TheOrderOfThreadsChangesNothing) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  const std::vector<float> x = random_values<float>(20000, 5);
  const Sums want = sums_of(stream, x, 0);
  test::in_every_order([&] {
    const Sums got = sums_of(stream, x, 0);
    EXPECT_EQ(got.squares, want.squares);
    EXPECT_EQ(got.sum, want.sum);
  });
}

TEST(CudaReduce, WhatIsNotFiniteIsSeen) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  std::vector<float> x = random_values<float>(10001, 6);
  x[9999] = INFINITY;
  EXPECT_EQ(sums_of(stream, x, 0).squares, static_cast<double>(INFINITY));
  x[10000] = NAN;
  EXPECT_TRUE(std::isnan(sums_of(stream, x, 0).squares));
  EXPECT_NEAR(sums_of(stream, std::vector<float>(100, 1e30f), 0).squares, 1e62, 1e56);
}

}  // namespace
}  // namespace tessera::kernels
